"""Episodes without an engine: a client that answers texts, as the ids of a tokenizer."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.config.sections import RolloutConfig
from grpo_mp.rollout.client import EngineOutput, SamplingParams
from grpo_mp.rollout.episodes import EpisodeGroup, EpisodeRunner, load_episode_parts
from grpo_mp.utils.types import Prompt, Sample
from tests.virtual_time import run_virtually

ASK = {"role": "user", "content": "How many?"}


class TextClient:
    """Answers `texts` by their turns, each after `seconds`; the parser finds `[name]({...})` and takes as long.

    The n-th answer is of weight version n, and was verified in n steps of speculative decoding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], seconds: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        self.seconds = seconds
        self.index = 0
        self.prompts = list[tuple[int, ...]]()

    async def generate(self, tokens: Any, sampling: SamplingParams, routing: Any = None) -> list[EngineOutput]:
        self.prompts.append(tuple(tokens))
        await asyncio.sleep(self.seconds)
        text = self.texts[(len(self.prompts) - 1) % len(self.texts)]
        sampled = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        count = len(self.prompts)
        numbers = (-0.5 * count,) * len(sampled), (count,) * len(sampled)
        return [EngineOutput(sampled, *numbers, truncated=False, verify_steps=count)]

    async def parse_tool_calls(self, text: str, tools: Any, parser: str) -> tuple[str, list[tuple[str, str]]]:
        await asyncio.sleep(self.seconds)
        calls = re.findall(r"\[(\w+)\]\((.*?)\)", text)
        return re.sub(r"\[(\w+)\]\((.*?)\)", "", text), calls

    async def abort_all(self) -> None:
        """Nothing is being generated."""


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the end of the first of `stops` in it, as an engine does."""
    for end in stops:
        text = text.partition(end)[0] + end if end in text else text
    return text


def make_runner(client: TextClient, function: str | None, **config: Any) -> EpisodeRunner:
    sizes = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 2000, "max_response_tokens": 2000}
    parts = load_episode_parts(RolloutConfig(**sizes | {"function": function} | config), client.tokenizer)
    assert parts
    engine: Any = client
    return EpisodeRunner(parts, engine, asyncio.Semaphore(4))


def make_prompt(runner: EpisodeRunner) -> Prompt:
    return Prompt(4, "How many?", runner.parts.renderer.prompt([ASK]), messages=(ASK,))


def counts(sample: Sample) -> dict[str, float]:
    """Return the metrics of an episode that are no times."""
    return {name: value for name, value in sample.metrics.items() if not name.endswith("_s")}


def roll_out(runner: EpisodeRunner, prompt: Prompt | None = None) -> Sample:
    """Roll out one episode."""

    async def run() -> Sample:
        try:
            asked = prompt or make_prompt(runner)
            (sample,) = await runner.run_group(EpisodeGroup(asked, 7, 1, 1, SamplingParams(2000), None))
            return sample
        finally:
            await runner.parts.tools.close()

    return asyncio.run(run())


def roll_out_virtually(runner: EpisodeRunner, count: int) -> Sequence[Sample]:
    """Roll out a group whose function and tools use no threads and processes, in virtual time."""
    samples: Sequence[Sample] = run_virtually(
        runner.run_group(EpisodeGroup(make_prompt(runner), 7, count, 1, SamplingParams(2000), None))
    )
    return samples
