"""Agents that send texts or token ids to the completions of their endpoint: turns are recorded as those of chats."""

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from grpo_mp.rollout.client import EngineOutput, SamplingParams
from grpo_mp.rollout.openai_completions import read_completion
from grpo_mp.rollout.openai_requests import RequestError
from grpo_mp.rollout.protocol import Task
from grpo_mp.utils.types import Sample
from tests.episodes.test_chat import make_renderer
from tests.rollout.engineless import TextClient, cut_at_stop, make_runner, roll_out

HERE = str(Path(__file__))
END = "<|im_end|>"
WORDS = make_renderer("qwen3", tools=False).tokenizer
WORDS.add_tokens(["Seven"])
POLICY: Any = SimpleNamespace(temperature=1.0, top_p=1.0)


class RaggedClient(TextClient):
    """Samples a token for each letter, which no text with an added token encodes to; stops behind a text of `stop`."""

    def __init__(self, *texts: str) -> None:
        super().__init__(WORDS, texts)
        self.lengths = list[int]()

    async def generate(self, tokens: Any, sampling: SamplingParams, routing: Any = None) -> list[EngineOutput]:
        self.lengths.append(sampling.max_response_tokens)
        (output,) = await super().generate(tokens, sampling, routing)
        text = cut_at_stop(WORDS.decode(output.tokens), sampling.stop)
        sampled = by_letter(text)[: sampling.max_response_tokens]
        cut = len(sampled) < len(by_letter(text))
        numbers = (output.logprobs[:1] * len(sampled), output.weight_versions[:1] * len(sampled))
        return [EngineOutput(sampled, *numbers, truncated=cut)]


def encode(text: str) -> tuple[int, ...]:
    return tuple(WORDS.encode(text, add_special_tokens=False))


def by_letter(text: str) -> tuple[int, ...]:
    letters, end, _ = text.partition(END)
    return tuple(token for letter in (*letters, end) for token in encode(letter))


def connect(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def by_text(task: Task, base_url: str, api_key: str) -> float:
    """Writes the template by itself; the second prompt has the stop token that it was not shown."""
    async with connect(base_url, api_key) as client:
        create = client.completions.create
        prompt = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
        first = await create(model="m", prompt=prompt, logprobs=1, max_tokens=100)
        (choice,) = first.choices
        assert (first.object, choice.text, choice.finish_reason) == (
            "text_completion",
            "<think>3+4</think>Seven.",
            "stop",
        )
        assert choice.logprobs
        assert choice.logprobs.tokens == [*choice.text, END]
        assert choice.logprobs.token_logprobs == [-0.5] * len(choice.logprobs.tokens)
        assert choice.logprobs.text_offset == [*accumulate(map(len, choice.logprobs.tokens[:-1]), initial=0)]
        assert first.usage
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(encode(prompt)), 25)
        prompt += f"{choice.text}{END}\n<|im_start|>user\nSure?{END}\n<|im_start|>assistant\n"
        stream = await create(model="m", prompt=[prompt], stream=True)
        (chunk,) = [chunk async for chunk in stream]
        assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("Sure.", "stop")
        await create(model="m", prompt="<|im_start|>another", max_tokens=2)
    return 1.0


async def by_ids(task: Task, base_url: str, api_key: str) -> list[float]:
    """Goes on from the ids that it is given."""
    async with connect(base_url, api_key) as client:
        asked: dict[str, Any] = {"model": "m", "extra_body": {"return_token_ids": True}}
        prompt = [*encode("Three and four:")]
        for expected in ("<think>3+4</think>Seven.", "Sure."):
            (choice,) = (await client.completions.create(prompt=prompt, **asked)).choices
            assert (choice.text, choice.logprobs) == (expected, None)
            fields: dict[str, Any] = choice.model_extra or {}
            assert fields["prompt_token_ids"] == prompt
            assert fields["token_ids"] == [*by_letter(expected + END)]
            prompt = [*prompt, *fields["token_ids"], *encode("?")]
        with pytest.raises(openai.BadRequestError, match=r"each of the \d+ of the tokenizer"):
            await client.completions.create(model="m", prompt=[10**6])
    return [0.25, 0.75]


async def ids_then_text(task: Task, base_url: str, api_key: str) -> float:
    """Begins with ids, and goes on with the text of the same conversation."""
    async with connect(base_url, api_key) as client:
        prompt = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
        first = await client.completions.create(model="m", prompt=list(encode(prompt)))
        prompt += f"{first.choices[0].text}{END}\n<|im_start|>user\nSure?{END}\n<|im_start|>assistant\n"
        await client.completions.create(model="m", prompt=prompt)
    return 1.0


async def by_stops(task: Task, base_url: str, api_key: str) -> float:
    """A ReAct agent: writes the text that stopped an answer, and what it found."""
    async with connect(base_url, api_key) as client:
        prompt = "Question: 3+4\n"
        answer = await client.completions.create(model="m", prompt=prompt, stop=["\nFound:"])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Look", "stop")
        prompt += answer.choices[0].text + "\nFound: 7\n"
        await client.completions.create(model="m", prompt=prompt, stop=["\nFound:"])
    return 1.0


async def again(task: Task, base_url: str, api_key: str) -> float:
    """Asks the same twice, of which nothing follows the first answer; goes on from one that was cut."""
    async with connect(base_url, api_key) as client:
        for _ in range(2):
            await client.completions.create(model="m", prompt="Say nothing.")
        cut = await client.completions.create(model="m", prompt="Count:", max_tokens=2)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("12", "length")
        await client.completions.create(model="m", prompt="Count:12")
    return 1.0


def play(client: TextClient, agent: str, **config: Any) -> Sample:
    sample = roll_out(make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:{agent}"}, **config))
    assert sample.error == ""
    return sample


def runs(sample: Sample) -> list[tuple[bool, str]]:
    """The response in stretches that were generated, or given."""
    found = list[tuple[bool, list[int]]]()
    for token, own in zip(sample.tokens, sample.generated, strict=True):
        if not found or found[-1][0] != own:
            found.append((own, []))
        found[-1][1].append(token)
    return [(own, WORDS.decode(tokens)) for own, tokens in found]


@pytest.mark.parametrize("tools", [{}, {"tools": ["tools.tiny.calculator:calculator"], "tool_parser": "test"}])
def test_texts_go_on_from_what_was_sampled(tools: dict[str, Any]) -> None:
    client = RaggedClient(f"<think>3+4</think>Seven.{END}", f"Sure.{END}", "no")
    sample = play(client, "by_text", **tools)
    assert sample.metrics == {"turns": 3, "forks": 1}
    (kept,), (first, second) = sample.earlier, client.texts[:2]
    assert kept.tokens[: len(by_letter(first))] == by_letter(first) != encode(first)
    assert runs(kept) == [
        *((True, first), (False, f"\n<|im_start|>user\nSure?{END}\n<|im_start|>assistant\n"), (True, second))
    ]
    own = [
        pair
        for *pair, is_own in zip(kept.rollout_logprobs, kept.weight_versions, kept.generated, strict=True)
        if is_own
    ]
    assert own == [[-0.5, 1]] * len(by_letter(first)) + [[-1.0, 2]] * len(by_letter(second))
    assert WORDS.decode(sample.prompt_tokens) == "<|im_start|>another"
    assert client.lengths[0] == 100 < client.lengths[1]


def test_ids_go_on_from_what_was_sampled() -> None:
    client = RaggedClient(f"<think>3+4</think>Seven.{END}", f"Sure.{END}")
    sample = play(client, "by_ids")
    assert sample.metrics == {"turns": 2, "forks": 0}
    assert WORDS.decode(sample.prompt_tokens) == "Three and four:"
    assert runs(sample) == [(True, client.texts[0]), (False, "?"), (True, client.texts[1])]
    assert [reward for _, reward in sample.step_rewards] == [0.25, 0.75]


def test_a_text_that_stopped_an_answer_is_not_given_again() -> None:
    client = RaggedClient("Look\nFound: 8\nFound: 9", "Seven.\nFound: 1")
    sample = play(client, "by_stops")
    assert sample.metrics == {"turns": 2, "forks": 0}
    assert runs(sample) == [(True, "Look\nFound:"), (False, " 7\n"), (True, "Seven.\nFound:")]


def test_a_prompt_that_comes_again_is_answered_anew() -> None:
    client = RaggedClient(END, END, "123456", "3456")
    sample = play(client, "again")
    assert sample.metrics == {"turns": 4, "forks": 2}
    assert [WORDS.decode(part.prompt_tokens) for part in sample.sequences] == ["Say nothing."] * 2 + ["Count:"]
    assert WORDS.decode(sample.tokens) == "123456"


def test_calls_of_tools_are_text_here() -> None:
    client = RaggedClient(f'[calculator]({{"a": 1}}) so{END}')
    config = {"tools": ["tools.tiny.calculator:calculator"], "tool_parser": "test"}
    sample = play(client, "with_a_call", **config)
    assert sample.metrics["turns"] == 1


async def with_a_call(task: Task, base_url: str, api_key: str) -> float:
    async with connect(base_url, api_key) as client:
        answer = await client.completions.create(model="m", prompt="Call.")
        assert answer.choices[0].text == '[calculator]({"a": 1}) so'
    return 1.0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": ""}, "prompt must be one text, or one list of token ids, and not empty"),
        ({"prompt": ["a", "b"]}, "prompt must be one text"),
        ({"prompt": [[1], [2]]}, "prompt must be one text"),
        ({"prompt": [True]}, "prompt must be one text"),
        ({"n": 2}, "n=2: all turns are sampled as the run says: leave it out or set 1"),
        ({"best_of": 3}, "best_of=3: all turns are sampled as the run says: leave it out or set 1"),
        ({"echo": True}, "echo=true: all turns are sampled as the run says: leave it out or set false"),
        ({"logprobs": 5}, "logprobs=5: those of the sampled tokens are known, of no others: set 0 or 1"),
        ({"logprobs": "a"}, "logprobs must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 on"),
        ({"temperature": 0.5}, "temperature=0.5: all turns are sampled as the run says: leave it out or set 1.0"),
        ({"messages": []}, ""),
        ({"messages": ["a"]}, "messages: no turn here can follow this parameter"),
    ],
)
def test_what_no_turn_can_follow_is_refused(fields: dict[str, Any], sentence: str) -> None:
    body = {"model": "m", "prompt": "a", "suffix": None, "user": "me"}
    if not sentence:
        assert read_completion(body | fields, POLICY).prompt == "a"
        return
    with pytest.raises(RequestError) as refused:
        read_completion(body | fields, POLICY)
    assert str(refused.value).startswith(sentence)


def test_what_is_ignored_is_told() -> None:
    read = read_completion({"prompt": [[1, 2]], "echo": True, "logprobs": 5}, POLICY, ignores_sampling=True)
    assert (read.prompt, read.logprobs, read.ignored) == ((1, 2), True, ("echo",))


def test_a_text_goes_on_from_ids_that_it_encodes_to() -> None:
    """Else the first turn would be in two sequences, and be learned twice."""
    sample = play(TextClient(WORDS, [f"Seven.{END}", f"Sure.{END}"]), "ids_then_text")
    assert (sample.metrics, sample.earlier) == ({"turns": 2, "forks": 0}, ())
    assert [own for own, _ in runs(sample)] == [True, False, True]
