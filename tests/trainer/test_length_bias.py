"""Admission prefers no length: what is trained on is as long as what is launched, whoever is faster."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from grpo_mp.data.prompts import PromptSet
from grpo_mp.rollout.client import EngineOutput, SamplingParams
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.utils.types import Prompt, SampleInfo
from tests.trainer.test_collect import collector, each_step

PROMPTS = 6000
STEPS = 25
NEEDED = 64
GROUP = 8
SLOTS = 64
SHORTEST = 16
LONGEST = 512
TRAIN_S = 0.8
BOUND = 0.01


@cache
def length_of(prompt: int, index: int) -> int:
    return min(LONGEST, max(SHORTEST, int(Random(f"{prompt}/{index}").lognormvariate(4.2, 1.0))))


@cache
def is_kept(prompt: int) -> bool:
    return Random(f"{prompt} is kept").random() < 0.5


def filter_half(samples: Sequence[SampleInfo]) -> bool:
    return is_kept(samples[0].prompt)


@dataclass
class SeededEngine:
    """A prompt is one token, and every token of a response its index in the group; it takes its length's time."""

    token_s: float
    delays: Random
    version: int = 0
    prompts: set[int] = field(default_factory=set)
    _aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        count: int = 1,
        routing: None = None,
        routed_tokens: int = 0,
    ) -> list[EngineOutput]:
        prompt, *given = prompt_tokens
        self.prompts.add(prompt)
        token_s = self.token_s * self.delays.uniform(0.7, 1.4)
        indices = given[:1] or range(count)
        return await asyncio.gather(*(self._respond(prompt, index, len(given), token_s) for index in indices))

    async def _respond(self, prompt: int, index: int, given: int, token_s: float) -> EngineOutput:
        left = length_of(prompt, index) - given
        loop = asyncio.get_running_loop()
        done = 0
        begun = loop.time()
        try:
            async with asyncio.timeout(left * token_s):
                await self._aborted.wait()
            done = min(left, max(1, int((loop.time() - begun) / token_s)))
        except TimeoutError:
            done = left
        return EngineOutput((index,) * done, (-1.0,) * done, (self.version,) * done, False, aborted=done < left)

    async def abort_all(self) -> None:
        self._aborted.set()
        self._aborted = asyncio.Event()


def train(
    group: dist.ProcessGroup, folder: Path, schedule: str, filter_: dict[str, Any], staleness: int
) -> tuple[list[RolloutBatch], set[int]]:
    """Collect the steps of a run; return them and the prompts that engines began."""
    delays = Random(0)
    engines: list[Any] = [SeededEngine(0.002, delays), SeededEngine(0.003, delays)]
    sizes = {"prompts_per_step": NEEDED, "group_size": GROUP, "max_response_tokens": LONGEST}
    more = {"virtual_time": True, "max_staleness": staleness, **sizes}
    stub = collector(SimpleNamespace(group=group), engines, SLOTS, filter_, schedule, STEPS, folder, **more)
    prompts = PromptSet("test", [tuple(Prompt(i, str(i), (i,)) for i in range(PROMPTS))])
    collect: Any = replace(stub, prompts=prompts, group_filter=filter_half)
    batches = list[RolloutBatch]()
    for _, batch in each_step(collect, engines, STEPS):
        batches.append(batch)
        collect.rollout.loop.run(asyncio.sleep(TRAIN_S))
    collect.rollout.loop.close()
    return batches, engines[0].prompts | engines[1].prompts


def lengths_of(prompts: set[int]) -> list[int]:
    return [length_of(prompt, index) for prompt in prompts for index in range(GROUP)]


def ks_distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the largest difference of two empirical distributions (Kolmogorov-Smirnov)."""
    values = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(side), values, side="right") / len(side) for side in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize(
    ("schedule", "staleness"),
    [("colocated", 1), pytest.param("one_step_off", 1, marks=pytest.mark.nightly), ("async", 4)],
)
def test_trained_lengths_are_launched_lengths(
    one_rank_group: dist.ProcessGroup, tmp_path: Path, schedule: str, staleness: int
) -> None:
    """The filter, which no length decides, drops half; its groups are compared, too, without those that it drops."""
    batches, launched = train(one_rank_group, tmp_path, schedule, {"zero_std": "refill"}, staleness)
    trained = [info.response_tokens for batch in batches for info in batch.infos]
    assert len(trained) == STEPS * NEEDED * GROUP > 10_000
    assert ks_distance(trained, lengths_of(launched)) < BOUND
    assert ks_distance(trained, lengths_of({prompt for prompt in launched if is_kept(prompt)})) < BOUND
    assert fmean(batch.length_bias for batch in batches) == pytest.approx(1, abs=0.02)
