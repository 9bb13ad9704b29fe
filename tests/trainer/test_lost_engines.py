"""Engines that are lost, hang, or have groups past their limit: the others generate these, each once."""

import asyncio
import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.utils.errors import EngineError, UserError
from grpo_mp.utils.types import SampleGroup
from tests.rollout.fake_engine import FakeEngine
from tests.trainer.test_collect import PROMPTS, MortalEngine, check_samples, collector, each_step, kept, run_steps


class StuckEngine(FakeEngine):
    """Its answers to some prompts run into the group's limit."""

    async def generate(self, prompt_tokens: Sequence[int], *arguments: Any, **more: Any) -> Any:
        if prompt_tokens[0] % 10 == 3:
            await asyncio.sleep(0.01)
            raise TimeoutError
        return await super().generate(prompt_tokens, *arguments, **more)


@pytest.mark.parametrize("filter_", [{}, {"zero_std": "refill"}], ids=["keep", "refill"])
@pytest.mark.parametrize(("schedule", "max_staleness"), [("colocated", 0), ("colocated", 1), ("async", 1)])
def test_a_group_past_its_limit_is_replaced_by_the_next_prompt(
    one_rank_job: Any, schedule: str, max_staleness: int, filter_: dict[str, Any]
) -> None:
    engines: list[Any] = [StuckEngine(0), StuckEngine(1)]
    collect = collector(one_rank_job, engines, 12, filter_, schedule=schedule, max_staleness=max_staleness)
    batches = run_steps(collect, engines, 3)
    trained = [group.prompt.index for batch in batches for group in batch.groups]
    expected = [prompt for prompt in range(PROMPTS) if prompt % 10 != 3 and (kept(prompt) or not filter_)]
    assert trained == expected[: 3 * 8]
    stuck = [prompt for prompt in range(trained[-1] + 1) if prompt % 10 == 3]
    assert sum(batch.dropped["aborted"] for batch in batches) == len(stuck)
    for batch in batches:
        check_samples(batch)
        assert math.isnan(batch.length_bias) == bool(batch.dropped["aborted"])  # how long its answers are is not known


def test_what_a_group_past_its_limit_had_is_counted(one_rank_job: Any) -> None:
    """Its answers run into the limit when they go on in the next step: those are the long ones."""

    class StuckLater(FakeEngine):
        async def generate(self, prompt_tokens: Sequence[int], *arguments: Any, **more: Any) -> Any:
            if prompt_tokens[0] in asked:
                raise TimeoutError
            asked.update({prompt_tokens[0]} if prompt_tokens[0] % 2 else {})
            return await super().generate(prompt_tokens, *arguments, **more)

    asked = set[int]()
    engines: list[Any] = [StuckLater(token_s=2e-3)]  # slower than the stream is read
    collect = collector(one_rank_job, engines, 12, {}, virtual_time=True, max_staleness=1)
    batches = run_steps(collect, engines, 12)
    carried = sum(
        sum(len(one.tokens) for one in (group.samples if isinstance(group, SampleGroup) else group.outputs))
        for group in collect._carried.values()
    )
    launched = [info for batch in batches for info in batch.launched]
    assert sum(info.response_tokens for info in launched) + carried == sum(engine.generated for engine in engines)
    aborted = {info.group_id for info in launched if not info.finished}
    assert len(aborted) == sum(batch.dropped["aborted"] for batch in batches) > 0
    assert not any(batch.dropped["unfinished"] or math.isnan(batch.length_bias) for batch in batches)


def test_a_step_all_of_whose_groups_take_too_long_says_so(one_rank_job: Any) -> None:
    collect = collector(one_rank_job, [FakeEngine(token_s=10.0)], 40, {}, virtual_time=True)
    collect.rollout.group_timeout_s = 0.1
    with pytest.raises(
        UserError, match=r"^step 1: 16 groups took longer than rollout\.group_timeout_s=600 s: raise it$"
    ):
        collect.collect(TrainState(), 1)


def test_the_engine_of_a_group_past_its_limit_is_lost_if_it_is_not_well(one_rank_job: Any) -> None:
    class HungEngine(StuckEngine):
        async def check_health(self) -> None:
            raise EngineError("engine 0: hangs")

    collect = collector(one_rank_job, [HungEngine()], 12, {})
    with pytest.raises(EngineError, match="engine 0: hangs"):
        collect.collect(TrainState(), 1)


@pytest.mark.parametrize(
    ("schedule", "max_staleness", "tokens_ahead"),
    [("colocated", 0, None), ("colocated", 2, None), ("colocated", 2, 20), ("async", 2, None), ("async", 2, 20)],
)
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_lost_engines_are_generated_once_by_others(
    one_rank_job: Any, schedule: str, max_staleness: int, tokens_ahead: int | None, seed: int
) -> None:
    """Engines are lost at random moments, one or both at a time; one comes back at any later step, both at once."""
    random, steps = Random(f"{schedule}/{max_staleness}/{seed}"), 8
    engines: list[Any] = [MortalEngine(index, random.uniform(5e-5, 3e-4)) for index in range(2)]
    ahead = {"max_staleness": max_staleness, "tokens_ahead": tokens_ahead}
    collect = collector(one_rank_job, engines, 6, {"zero_std": "refill"}, schedule=schedule, steps=steps, **ahead)
    lost = 0

    def revive() -> None:
        nonlocal lost
        none_left = all(engine.is_lost for engine in engines)
        for engine in engines:
            if engine.is_lost and not none_left and random.random() < 0.5:
                continue
            lost += engine.is_lost
            engine.is_lost, engine.lives = False, engine.lives if engine.lives > 0 else random.randint(1, 25)

    collect.recovery.run = collect.recovery.begin_step = revive
    trained = []
    for step, batch in each_step(collect, engines, steps):
        check_samples(batch)
        oldest = min(info.oldest_version for info in batch.infos)
        assert step - 1 - oldest <= max_staleness
        trained += [group.prompt.index for group in batch.groups]
    assert lost
    in_order = [number % PROMPTS for number in range(2 * PROMPTS) if kept(number % PROMPTS)]
    assert trained == in_order[: len(trained)]
