"""Seeded sampling on a deterministic engine: a response depends on nothing but its seed, its prompt and the weights."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams, sampling_seed
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.groups import joined
from grpo_mp.rollout.rollout import engine_seed
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.utils.types import Prompt
from tests.engines import started_engine
from tests.rollout.conftest import REQUEST_TIMEOUT_S, START_TIMEOUT_S

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)
SEEDED = SamplingParams(24, ignore_eos=True, seeds=tuple(sampling_seed(1, index) for index in range(4)))


Drawn = list[tuple[tuple[int, ...], tuple[float, ...]]]  # tokens and logprobs of each response


def test_seeds_are_a_pure_function_of_their_parts_in_order() -> None:
    assert sampling_seed(1, 2, 3, 4) == 7572104155751616089
    assert len({sampling_seed(*parts) for parts in ((1, 23), (12, 3), (3, 12), (1, 2, 3))}) == 4


def test_samples_of_an_epoch_have_seeds_of_their_own() -> None:
    """Neither those of a group, which an engine would otherwise draw alike, nor those of another prompt or epoch."""
    prompts = [Prompt(index, "", (), epoch=epoch) for index in range(3) for epoch in range(2)]
    train, eval_set = (RolloutTask(prompts.__getitem__, 4, 0, 1, SEEDED, seed=seed) for seed in (7, 8))
    seeds = [seed for task in (train, eval_set) for prompt in prompts for seed in task.sampling_of(prompt).seeds]
    assert len(set(seeds)) == len(seeds) == 2 * 6 * 4
    later = replace(train, first_group_id=9, step=5)
    assert later.sampling_of(prompts[0]) == train.sampling_of(prompts[0])


def drawn(outputs: Sequence[EngineOutput]) -> Drawn:
    return [(output.tokens, output.logprobs) for output in outputs]


async def draw_in_every_way(client: EngineClient) -> dict[str, Drawn]:
    """Draw the same four responses alone, in a batch, after a cache hit, in company, and continued in the middle."""
    alone = [output for index in range(4) for output in await client.generate(PROMPT, SEEDED.only(index))]
    cached = await client.generate(PROMPT, SEEDED, 4)
    await client.flush_cache_when_idle()
    batch = await client.generate(PROMPT, SEEDED, 4)
    others = [client.generate((*PROMPT, 3 + i), SamplingParams(20 + i, ignore_eos=True), 3) for i in range(5)]
    company, *_ = await asyncio.gather(client.generate(PROMPT, SEEDED, 4), *others)
    continued = []
    for index, output in enumerate(batch):
        rest = replace(SEEDED.only(index), max_response_tokens=24 - 9)
        (more,) = await client.generate((*PROMPT, *output.tokens[:9]), rest)
        begun = replace(output, tokens=output.tokens[:9], weight_versions=output.weight_versions[:9])
        continued.append(joined(replace(begun, logprobs=output.logprobs[:9]), more))
    ways = {"alone": alone, "cached": cached, "batch": batch, "company": company, "continued": continued}
    return {name: drawn(outputs) for name, outputs in ways.items()}


@pytest.mark.slow
def test_a_response_depends_on_its_seed_alone(make_spec: Callable[..., EngineSpec], tmp_path: Path) -> None:
    async def run(url: str, headers: dict[str, str]) -> dict[str, Drawn]:
        async with aclosing(EngineClient(3, url, headers, REQUEST_TIMEOUT_S)) as client:
            return await draw_in_every_way(client)

    spec = make_spec(args={"enable_deterministic_inference": True}, seed=7)
    with started_engine(spec, tmp_path / "engine.log") as process:
        process.wait_ready(START_TIMEOUT_S)
        ways = asyncio.run(run(process.url, dict(process.headers)))
    assert len({tokens for tokens, _ in ways["alone"]}) == 4
    for name, way in ways.items():
        assert way == ways["alone"], name


def test_engines_of_all_seeds_draw_otherwise() -> None:
    """Runs of seeds 0, 1, 2 are repeats of an experiment: no engine of one draws as another of the next."""
    seeds = [engine_seed(run_seed, engine) for run_seed in range(50) for engine in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert engine_seed(3, 5) == engine_seed(3, 5)
