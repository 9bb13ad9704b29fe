"""What a step trains on and counts depends neither on engines that die nor on which is faster."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config.sections import EngineConfig
from tests.rollout.fake_engine import FakeEngine
from tests.trainer.test_collect import MortalEngine, check_samples, collector, run_steps


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
        random, steps, deaths, trained = Random(seed), 8, 0, dict[int, list[Any]]()
        engines: list[Any] = [MortalEngine(index, 1e-4) for index in range(2)]
        ahead = {"max_staleness": max_staleness, "tokens_ahead": None if schedule == "one_step_off" else 7}
        collect = collector(one_rank_job, engines, 6, {}, schedule=schedule, steps=steps, **ahead)
        collect.settings.engine, restored = EngineConfig(deterministic=True), 0

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
        lost, all_lost = lost + deaths, all_lost + restored
    assert lost > 3
    assert bool(all_lost) == (schedule != "colocated")


def test_what_a_lost_engine_gave_back_too_late_goes_on_in_the_next_step(one_rank_job: Any) -> None:
    """The others had ended; nobody has it in memory."""
    engine = FakeEngine()
    collect = collector(one_rank_job, [engine], 6, {}, max_staleness=1, tokens_ahead=7)
    batch = collect.collect(TrainState(), 1)
    assert len(collect._carried) == 8
    collect._carried, engine.version = {}, 1
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
