"""Agents that speak to an OpenAI endpoint by the openai package: their turns are episodes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers.utils import get_json_schema

from grpo_mp.config.registries import ROLLOUT_FUNCTIONS
from grpo_mp.rollout.client import EngineOutput, SamplingParams
from grpo_mp.rollout.protocol import Task
from grpo_mp.utils.errors import UserError
from tests.episode_page import read_example
from tests.rollout.conftest import Logprobs
from tests.rollout.engineless import TextClient, counts, cut_at_stop, make_runner
from tests.rollout.engineless import roll_out as roll_out_alone
from tools.tiny.calculator import calculator
from tools.tiny.products import tokenizer as calculator_tokenizer

HERE = str(Path(__file__))
BOUND = 1e-4
WORDS = calculator_tokenizer()
RollOut = Callable[..., Any]
CALL_AGAIN = '[calculator(expression="6+7")]'
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def make_client(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def refusals(client: AsyncOpenAI, messages: Any) -> list[str]:
    """The sentences of requests that no turn comes of."""
    wanted: list[dict[str, Any]] = [
        {"n": 2},
        {"max_tokens": 0},
        {"tools": [TOOL]},
        {"tools": [{"type": "function", "function": {"name": "add", "parameters": "none"}}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ]
    sentences = []
    for fields in wanted:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "m", "messages": messages} | fields)
        sentences.append(refused.value.body["message"])  # type: ignore[index]
    return sentences


async def careful(task: Task, base_url: str, api_key: str) -> float:
    """Uses all of the endpoint; index 1 changes what it was answered."""
    async with make_client(base_url, api_key) as client:
        messages: list[Any] = [*task.messages]
        assert (await client.models.list()).data[0].id == "policy"
        sentences = await refusals(client, messages)
        assert sentences[0] == "n: Input should be 1"
        assert "rollout.tool_parser" in sentences[2]
        assert "function.parameters" in sentences[3]
        assert sentences[-1].startswith("messages.0.content")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key=api_key[:-1]).models.list()
        first = await client.chat.completions.create(model="m", messages=messages, max_tokens=6, temperature=1.0)
        said = first.choices[0].message.content
        reason = first.choices[0].finish_reason
        count = first.usage.completion_tokens
        assert reason == "stop" or (reason == "length" and count == 6)
        answer = {"role": "assistant", "content": said + "!" if task.index == 1 else said}
        again = [*messages, answer, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
        chunks = await client.chat.completions.create(model="m", messages=again, max_tokens=6, stream=True)
        (chunk,) = [chunk async for chunk in chunks]
        assert chunk.choices[0].finish_reason
        assert isinstance(chunk.choices[0].delta.content, str)
        with pytest.raises(openai.BadRequestError) as ended:
            await client.chat.completions.create(model="m", messages=messages)
        assert ended.value.code == "context_length_exceeded"
    return 0.5


LEFT: dict[str, Any] = {}


async def left_open(task: Task, base_url: str, api_key: str) -> None:
    """Ends while a request of its own is being answered; index 1 sees what came of it, and then passes its limit."""
    client = make_client(base_url, api_key)
    create = client.chat.completions.create
    is_asked = task.prompt.columns["is_asked"]
    if task.index == 0:
        LEFT["client"] = client  # type: ignore[list-item]
        LEFT["request"] = asyncio.ensure_future(create(model="m", messages=[*task.messages]))
        await is_asked.wait()
        return
    await is_asked.wait()
    with pytest.raises(openai.APIError):
        await LEFT["request"]
    with pytest.raises(openai.AuthenticationError, match="has ended"):
        await LEFT["client"].models.list()
    await LEFT["client"].close()
    async with client:
        while True:
            await create(model="m", messages=[*task.messages], max_tokens=2)  # type: ignore[list-item]


def test_an_agents_turns_are_an_episode(roll_out: RollOut, model_folder: Path, expected_logprobs: Logprobs) -> None:
    args = {"agent": f"{HERE}:careful"}
    prompt, group = roll_out("openai_agent", function_args=args, limits={"turns": 2})
    assert [(sample.state, sample.error) for sample in group.samples] == [("truncated", "")] * 2
    assert [sample.episode_reward for sample in group.samples] == [0.5, 0.5]
    assert [counts(sample) for sample in group.samples] == [{"turns": 2, "forks": 0}, {"turns": 2, "forks": 1}]
    kept, forked = group.samples
    assert kept.prompt_tokens == prompt.tokens != forked.prompt_tokens
    assert kept.given_tokens > 0 == forked.given_tokens
    for sample in group.samples:
        sequence = [*sample.prompt_tokens, *sample.tokens]
        of_next = expected_logprobs(model_folder, sequence)[len(sample.prompt_tokens) - 1 : -1]
        expected = of_next.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        differences = (torch.tensor(sample.rollout_logprobs) - expected).abs()
        assert differences[torch.tensor(sample.generated)].max() < BOUND


async def calling(task: Task, base_url: str, api_key: str) -> float:
    """Calls the tool that the policy asks for; index 1 sends other arguments back than it got."""
    async with make_client(base_url, api_key) as client:
        tools: list[Any] = [get_json_schema(calculator)]
        messages: list[Any] = [*task.messages]
        first = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0]
        (call,) = first.message.tool_calls or []
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        result = calculator(**json.loads(call.function.arguments))
        if task.index == 1:
            call.function.arguments = '{"expression": "1+1"}'
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        chunks = await client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True)
        (chunk,) = [chunk async for chunk in chunks]
        (again,) = chunk.choices[0].delta.tool_calls or []
        assert json.loads(again.function.arguments) == {"expression": "6+7"}
    return float(result)


def test_calls_of_an_agents_own_tools_are_spliced(roll_out: RollOut) -> None:
    words = WORDS

    async def generate(tokens: Any, sampling: SamplingParams, routing: Any = None) -> list[EngineOutput]:
        text = '[calculator(expression="2*3")]' if words.decode(tokens).count("<|tool|>") == 0 else CALL_AGAIN
        sampled = [*words.encode(text, add_special_tokens=False), words.eos_token_id]
        return [EngineOutput(tuple(sampled), (-1.0,) * len(sampled), (0,) * len(sampled), False)]

    _, group = roll_out(
        "openai_agent",
        function_args={"agent": f"{HERE}:calling"},
        tool_parser="pythonic",
        tokenizer=words,
        generate=generate,
        max_response_tokens=200,
    )
    kept, forked = group.samples
    assert (kept.error, forked.error, kept.metrics["forks"], forked.metrics["forks"]) == ("", "", 0, 1)
    assert kept.episode_reward == 6.0
    question = "<|system|>calculator<|im_end|><|user|>How many?<|im_end|><|assistant|>"
    call = '[calculator(expression="2*3")]<|im_end|>'
    answer = "<|tool|>6<|im_end|><|assistant|>"
    assert words.decode(kept.prompt_tokens) == question
    assert words.decode(kept.tokens) == call + answer + CALL_AGAIN + "<|im_end|>"
    assert words.decode([t for t, own in zip(kept.tokens, kept.generated, strict=True) if not own]) == answer
    assert words.decode(forked.tokens) == CALL_AGAIN + "<|im_end|>"


def test_an_agent_that_does_not_wait_or_stop_ends_its_episode(roll_out: RollOut) -> None:
    is_asked = asyncio.Event()

    async def generate(tokens: Any, sampling: SamplingParams, routing: Any = None) -> list[EngineOutput]:
        if not is_asked.is_set():
            is_asked.set()
            await asyncio.Event().wait()
        return [EngineOutput((5, 6), (-1.0, -1.0), (0, 0), truncated=False)]

    args = {"agent": f"{HERE}:left_open"}
    columns = {"is_asked": is_asked}
    _, group = roll_out("openai_agent", function_args=args, limits={"turns": 2}, columns=columns, generate=generate)
    ended, limited = group.samples
    assert (ended.state, ended.metrics["turns"]) == ("completed", 0)
    assert (limited.state, limited.metrics["turns"], limited.error) == ("truncated", 2, "")


def test_the_agent_of_the_page(roll_out: RollOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_example("An agent that speaks to an OpenAI endpoint", tmp_path)
    monkeypatch.chdir(tmp_path)
    _, group = roll_out("", answer="", limits={"turn_tokens": 6}, **settings["rollout"])
    assert [(sample.error, sample.metrics["turns"]) for sample in group.samples] == [("", 2)] * 2
    assert [sample.episode_reward for sample in group.samples] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"agnt": "x"}, "rollout.function 'openai_agent': its arguments: missing a required argument: 'agent'"),
        ({"agent": f"{HERE}:carefull"}, "has no carefull (did you mean careful?)"),
        ({"agent": f"{HERE}:make_client"}, "it must be a coroutine function"),
    ],
)
def test_what_is_no_agent_is_refused(args: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        ROLLOUT_FUNCTIONS.resolve("openai_agent", "rollout.function", args)
    assert message in str(refused.value)


OTHER: dict[str, Any] = {
    "temperature": 0.3,
    "seed": 5,
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
}


class StoppingClient(TextClient):
    """Ends an answer behind the first text of `stop`, as the engine does, and keeps what it was asked."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(WORDS, texts, 0.05)
        self.stops = list[tuple[str, ...]]()

    async def generate(self, tokens: Any, sampling: SamplingParams, routing: Any = None) -> list[EngineOutput]:
        self.stops.append(sampling.stop)
        (output,) = await super().generate(tokens, sampling, routing)
        text = cut_at_stop(WORDS.decode(output.tokens), sampling.stop)
        sampled = tuple(WORDS.encode(text, add_special_tokens=False))
        return [EngineOutput(sampled, output.logprobs[: len(sampled)], output.weight_versions[: len(sampled)], False)]


async def other_sampling(task: Task, base_url: str, api_key: str) -> float:
    """Asks twice for other sampling, and for several answers."""
    async with make_client(base_url, api_key) as client:
        messages: list[Any] = [*task.messages]
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=messages, **OTHER)
        with pytest.raises(openai.BadRequestError, match="n: Input should be 1"):
            await client.chat.completions.create(model="m", messages=messages, n=2)
    return 1.0


async def stopping(task: Task, base_url: str, api_key: str) -> float:
    """Wants an answer up to a digit, and goes on from it."""
    async with make_client(base_url, api_key) as client:
        messages: list[Any] = [*task.messages]
        first = await client.chat.completions.create(model="m", messages=messages, stop=["7"])
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("6", "stop")
        messages += [first.choices[0].message, {"role": "user", "content": "8"}]
        again = await client.chat.completions.create(model="m", messages=messages, stop="9")
        assert again.choices[0].message.content == "678"
        with pytest.raises(openai.BadRequestError, match="stop"):
            await client.chat.completions.create(model="m", messages=messages, stop=[7])  # type: ignore[list-item]
    return 1.0


async def at_once(task: Task, base_url: str, api_key: str) -> float:
    """Asks three questions at one time, one of which it has no patience for."""
    async with make_client(base_url, api_key) as client:
        questions: list[list[Any]] = [[{"role": "user", "content": text}] for text in "123"]
        create = client.chat.completions.create
        *asked, impatient = [asyncio.create_task(create(model="m", messages=question)) for question in questions]
        await asyncio.sleep(0.02)
        impatient.cancel()
        answers = await asyncio.gather(*asked)
        assert {answer.choices[0].message.content for answer in answers} == {"678"}
        assert {answer.usage.prompt_tokens for answer in answers if answer.usage} == {len(prompt_of("1"))}
    return 1.0


def prompt_of(text: str) -> list[int]:
    return WORDS.encode(f"<|user|>{text}<|im_end|><|assistant|>", add_special_tokens=False)


def test_other_sampling_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    client = StoppingClient(["678<|im_end|>"])
    sample = roll_out_alone(make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:other_sampling"}))
    assert (sample.state, sample.error, sample.metrics["turns"]) == ("completed", "", 2)
    (sentence,) = [record.getMessage() for record in caplog.records if "requests of agents" in record.getMessage()]
    assert all(name in sentence for name in OTHER)


def test_a_text_that_stops_is_sampled_and_not_shown() -> None:
    client = StoppingClient(["678<|im_end|>"])
    runner = make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:stopping"})
    sample = roll_out_alone(runner)
    assert (sample.error, sample.metrics["turns"], sample.metrics["forks"]) == ("", 2, 0)
    assert client.stops == [("7",), ("9",)]
    assert WORDS.decode(sample.tokens) == "67<|im_end|><|user|>8<|im_end|><|assistant|>678<|im_end|>"
    own = [token for token, generated in zip(sample.tokens, sample.generated, strict=True) if generated]
    assert WORDS.decode(own) == "67678<|im_end|>"


def test_requests_at_one_time_are_answered_one_after_the_other() -> None:
    client = StoppingClient(["678<|im_end|>"])
    sample = roll_out_alone(make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:at_once"}))
    assert sample.error == ""
    assert sample.metrics["turns"] == 2
    assert sample.metrics["forks"] == len(sample.earlier) == 1
    assert {WORDS.decode(part.prompt_tokens) for part in (sample, *sample.earlier)} <= {
        WORDS.decode(prompt_of(text)) for text in "123"
    }
