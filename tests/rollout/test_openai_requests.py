"""What agents ask of their endpoint beside messages: other sampling, texts that stop, several requests at a time."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from grpo_mp.rollout.client import EngineOutput, SamplingParams
from grpo_mp.rollout.protocol import Task
from tests.rollout.engineless import TextClient, cut_at_stop, make_runner, roll_out
from tools.tiny.products import tokenizer as calculator_tokenizer

HERE = str(Path(__file__))
WORDS = calculator_tokenizer()
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


def connect(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def other_sampling(task: Task, base_url: str, api_key: str) -> float:
    """Asks twice for other sampling, and for several answers."""
    async with connect(base_url, api_key) as client:
        messages: list[Any] = [*task.messages]
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=messages, **OTHER)
        with pytest.raises(openai.BadRequestError, match="n: Input should be 1"):
            await client.chat.completions.create(model="m", messages=messages, n=2)
    return 1.0


async def stopping(task: Task, base_url: str, api_key: str) -> float:
    """Wants an answer up to a digit, and goes on from it."""
    async with connect(base_url, api_key) as client:
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
    async with connect(base_url, api_key) as client:
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
    sample = roll_out(make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:other_sampling"}))
    assert (sample.state, sample.error, sample.metrics["turns"]) == ("completed", "", 2)
    (sentence,) = [record.getMessage() for record in caplog.records if "requests of agents" in record.getMessage()]
    assert all(name in sentence for name in OTHER)


def test_a_text_that_stops_is_sampled_and_not_shown() -> None:
    client = StoppingClient(["678<|im_end|>"])
    runner = make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:stopping"})
    sample = roll_out(runner)
    assert (sample.error, sample.metrics["turns"], sample.metrics["forks"]) == ("", 2, 0)
    assert client.stops == [("7",), ("9",)]
    assert WORDS.decode(sample.tokens) == "67<|im_end|><|user|>8<|im_end|><|assistant|>678<|im_end|>"
    own = [token for token, generated in zip(sample.tokens, sample.generated, strict=True) if generated]
    assert WORDS.decode(own) == "67678<|im_end|>"


def test_requests_at_one_time_are_answered_one_after_the_other() -> None:
    client = StoppingClient(["678<|im_end|>"])
    sample = roll_out(make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:at_once"}))
    assert sample.error == ""
    assert sample.metrics["turns"] == 2
    assert sample.metrics["forks"] == len(sample.earlier) == 1
    assert {WORDS.decode(part.prompt_tokens) for part in (sample, *sample.earlier)} <= {
        WORDS.decode(prompt_of(text)) for text in "123"
    }
