"""Engines that are lost, hang, or have groups past their limit: others generate these once, and the same tokens."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config.sections import EngineConfig
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
    random = Random(f"{schedule}/{max_staleness}/{seed}")
    steps = 8
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
            engine.is_lost = False
            if engine.lives <= 0:
                engine.lives = random.randint(1, 25)

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


@pytest.mark.parametrize(
    ("schedule", "max_staleness"),
    [("colocated", 1), ("colocated", 2), ("one_step_off", 1), ("async", 2), ("async", 3)],
)
def test_the_weights_of_a_token_do_not_depend_on_engines_that_die(
    one_rank_job: Any, schedule: str, max_staleness: int
) -> None:
    """What a lost engine held of groups that were begun with older weights goes on elsewhere from its last pause.

    Where none is left, those that are started again get the weights that the lost ones had.
    """

    def drawn(seed: int | None) -> tuple[dict[int, list[Any]], int, int]:
        random = Random(seed)
        steps = 8
        deaths = 0
        trained = dict[int, list[Any]]()
        engines: list[Any] = [MortalEngine(index, 1e-4) for index in range(2)]
        ahead = {"max_staleness": max_staleness, "tokens_ahead": None if schedule == "one_step_off" else 7}
        collect = collector(one_rank_job, engines, 6, {}, schedule=schedule, steps=steps, **ahead)
        collect.settings.engine = EngineConfig(deterministic=True)
        restored = 0

        def revive(former: bool = False) -> None:
            nonlocal deaths, restored
            restored += former
            for engine in engines:
                deaths += engine.is_lost
                engine.is_lost = False

        collect.recovery.run = collect.recovery.begin_step = revive
        state = TrainState()
        for step in range(1, steps + 1):
            if seed is not None:
                for engine in engines if step % 4 == seed else [engines[step % 2]]:
                    engine.lives = random.randint(2, 12)
            batch = collect.collect(state, step)
            samples = [sample for group in batch.groups for sample in group.samples]
            trained[step] = sorted((s.prompt_tokens, s.index, s.tokens, s.weight_versions) for s in samples)
            state = replace(batch.state, step=step, optimizer_step=step)
            collect.finish_generation()
            for engine in engines:
                engine.version = step
            collect.synced_step = step
        return trained, deaths, restored

    undisturbed, *none = drawn(None)
    assert none == [0, 0]
    mixed = any(len(set(versions)) > 1 for rows in undisturbed.values() for *_, versions in rows)
    assert mixed == (schedule != "one_step_off")
    lost = all_lost = 0
    for seed in range(2):
        disturbed, deaths, restored = drawn(seed)
        assert disturbed == undisturbed
        lost = lost + deaths
        all_lost = all_lost + restored
    assert lost > 3
    assert bool(all_lost) == (schedule != "colocated")


def test_what_a_lost_engine_gave_back_too_late_goes_on_in_the_next_step(one_rank_job: Any) -> None:
    """The others had ended; nobody has it in memory."""
    engine = FakeEngine()
    collect = collector(one_rank_job, [engine], 6, {}, max_staleness=1, tokens_ahead=7)
    batch = collect.collect(TrainState(), 1)
    assert len(collect._carried) == 8
    collect._carried = {}
    engine.version = 1
    collect._begun.report_lost()
    later = collect.collect(replace(batch.state, step=1, optimizer_step=1), 2)
    check_samples(later)
    assert {sample.weight_versions[0] for group in later.groups for sample in group.samples} == {0}


def test_deterministic_engines_count_what_no_clock_decides(one_rank_job: Any) -> None:
    """Of refills and of groups launched at once, those behind the last that the step needs: here one engine is slow."""

    def counted(slow_s: float, filter_: dict[str, Any]) -> list[Any]:
        engines = [FakeEngine(0, 1e-4), FakeEngine(1, slow_s)]
        collect: Any = collector(one_rank_job, engines, 9, filter_, skips_solved=True)
        collect.settings.engine = EngineConfig(deterministic=True)
        rows = []
        for batch in run_steps(collect, engines, 5):
            ids = sorted({info.group_id for info in batch.launched})
            rows.append((ids, batch.dropped, batch.length_bias, sum(info.response_tokens for info in batch.launched)))
            rows.append((batch.state.groups_launched, batch.state.skipped_until, batch.state.solve_rates))
        return rows

    for filter_ in ({"zero_std": "refill"}, {"oversample_factor": 1.5}):
        assert counted(1e-4, filter_) == counted(1.5e-3, filter_)


def test_a_number_of_a_group_is_given_once(one_rank_job: Any) -> None:
    """Also of those launched at once that a step does not need: a record of one would pass as another step's."""
    engines = [FakeEngine(0, 1e-4), FakeEngine(1, 1e-4)]
    collect: Any = collector(one_rank_job, engines, 9, {"oversample_factor": 1.5})
    collect.settings.engine = EngineConfig(deterministic=True)
    steps: dict[int, set[int]] = {}
    collect._journal.append = lambda step, group_id, *_: steps.setdefault(group_id, set()).add(step)
    batches = list(run_steps(collect, engines, 5))
    assert len(steps) > sum(len({info.group_id for info in batch.infos}) for batch in batches)  # some are surplus
    assert all(len(of_group) == 1 for of_group in steps.values())
