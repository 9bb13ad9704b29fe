"""A lost engine takes groups again when the trainer lets it: by hand, where each response takes 100 s."""

from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from math import inf
from typing import Any

import pytest

from grpo_mp.simulation import loop
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.scenario import Rates, Scenario, Schedule
from tests.simulation.scenarios import scenario_of

Ends = Callable[..., tuple[float, ...]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Return when steps were trained, from the middle on.

    `fail_at_s`: when engines fail for the first time, none a second time. A decode step takes 1 s whatever the batch,
    training 10, a weight sync 5; an engine has places for half of a step's groups.
    """

    def ends(schedule: Schedule, fail_at_s: tuple[float, float], **changes: Any) -> tuple[float, ...]:
        def failures(_: Scenario) -> Iterator[tuple[float, int]]:
            yield from ((at - before, index) for index, (before, at) in enumerate(pairwise((0.0, *fail_at_s))))
            yield from repeat((inf, 0))

        monkeypatch.setattr(loop, "_failures", failures)
        rates = Rates(decode_step_s=1.0, train_token_s=0.0, update_s=10.0, sync_s=5.0)
        values = {"rates": rates, "lengths": (100,), "prompt_tokens": 0, "concurrent_groups": 4, "engine_mtbf_s": 1.0}
        return simulate(scenario_of(schedule, **(values | {"engine_restart_s": 20.0} | changes))).ends

    return ends


def test_one_step_off_it_joins_at_the_next_sync(ends: Ends) -> None:
    """Lost at 250 of the third step's 205 to 305; the other engine then has all: to 405; sync, both to 510."""
    assert ends(Schedule.ONE_STEP_OFF, (250.0, inf), steps=4) == pytest.approx((215, 420, 525))


def test_async_it_joins_at_the_sync_after_its_start_and_works_from_the_next_step_on(ends: Ends) -> None:
    """Lost at 105, there at 125, after the sync at 110: it has weights at 320, as the other has begun the third step.

    That one generates for the second step to 205 and 305, for the third to 410 and 510; then both to 615.
    """
    assert ends(Schedule.ASYNC, (105.0, inf), steps=4) == pytest.approx((315, 520, 625))


@pytest.mark.parametrize("schedule", [Schedule.ONE_STEP_OFF, Schedule.ASYNC])
def test_without_any_engine_the_trainer_waits_for_all_and_syncs(schedule: Schedule, ends: Ends) -> None:
    """Lost at 30 and 40, there at 50 and 60: with weights at 65, and all groups at 165; 5 s of the
    next step's 100 are in a sync, or it follows them."""
    assert ends(schedule, (30.0, 40.0), steps=2) == pytest.approx((175, 280))


def test_colocated_others_that_are_full_pause_for_it(ends: Ends) -> None:
    """Lost at 30, there at 50: all pause until 55, its groups begin anew, to 155; the next step is 170 to 270."""
    assert ends(Schedule.COLOCATED, (30.0, inf), steps=2) == pytest.approx((165, 280))


def test_colocated_others_that_have_places_go_on_and_the_step_ends_with_its_start(ends: Ends) -> None:
    """The other has the step's only group, from 30 to 130; one is there at 50, one at 330: the trainer waits for it."""
    early, late = (
        ends(Schedule.COLOCATED, (30.0, inf), steps=2, prompts_per_step=1, engine_restart_s=restart_s)
        for restart_s in (20.0, 300.0)
    )
    assert early == pytest.approx((140, 255))
    assert late == pytest.approx((340, 455))


def test_colocated_a_step_begins_with_all_engines(ends: Ends) -> None:
    """Lost in training, at 105, and there at 125: the sync ends at 115, and it has one of its own, to 130."""
    assert ends(Schedule.COLOCATED, (105.0, inf), steps=2, prompts_per_step=1) == pytest.approx((110, 240))
