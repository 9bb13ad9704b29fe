"""Guards of metrics, on series written out by hand; what a resumed run knows of the steps before."""

import math

import pytest
from pydantic import ValidationError

from grpo_mp.config.sections import MetricGuard
from grpo_mp.monitor.guards import MetricGuards
from grpo_mp.utils.errors import EarlyStopError


def stops(guards: MetricGuards, step: int, line: dict[str, float | None]) -> bool:
    try:
        guards.check(step, line)
    except EarlyStopError:
        return True
    return False


def first_violation(guard: MetricGuard, series: list[float | None], done: int = 0) -> int | None:
    """The first step, counted from 1, whose guard warns; `done`: steps of a run that was resumed after them."""
    lines = [{"train/entropy": value} for value in series]
    guards = MetricGuards({"train/entropy": guard}, lines[:done])
    for step, line in enumerate(lines[done:], done + 1):
        if stops(guards, step, line):
            return step
    return None


@pytest.mark.parametrize(
    ("limits", "series", "step"),
    [
        ({"min": 0.1}, [0.3, 0.1, 0.09], 3),
        ({"min": 0.1, "steps": 3}, [0.0, 0.0, 0.2, 0.0, 0.0, 0.0], 6),
        ({"max": 5.0, "steps": 2}, [6.0, 4.0, 6.0, 7.0], 4),
        ({"min": 0.1, "max": 5.0, "steps": 2}, [6.0, 0.0, 6.0, 0.0], None),
        ({"min": 0.1}, [0.3, None], 2),
        ({"max_drop": 0.5}, [0.1, 0.9, 0.5, 0.3], 4),
        ({"max_drop": 0.5, "steps": 2}, [0.0, 2.0, 1.0, 1.0, 0.0], 5),  # means 1, 1.5, 1, 0.5
        ({"max_drop": 0.5, "steps": 4}, [1.0, 1.0, 0.0], None),
        ({"max_drop": 0.5, "steps": 2}, [1e308, 1e308], 2),
    ],
)
def test_the_step_at_which_a_guard_speaks(
    limits: dict[str, float], series: list[float | None], step: int | None
) -> None:
    guard = MetricGuard(**limits)
    assert first_violation(guard, series) == step
    for done in range(1, (step or len(series))):
        assert first_violation(guard, series, done) == step


@pytest.mark.parametrize("first", [math.inf, None])
@pytest.mark.parametrize("before", [(), (0.5,)])
def test_what_is_not_finite_is_no_best(first: float | None, before: tuple[float, ...]) -> None:
    """The guard goes on with the steps after it, in the run and in one that was resumed."""
    lines = [{"train/entropy": value} for value in (*before, first, 0.9, 0.5, 0.3)]
    for done in range(len(lines)):
        guards = MetricGuards({"train/entropy": MetricGuard(max_drop=0.5)}, lines[:done])
        spoken = [stops(guards, step, line) for step, line in enumerate(lines[done:])]
        assert spoken[-3:] == [False, False, True][-len(spoken) :]


def test_a_stop_names_metric_value_and_setting() -> None:
    guards = MetricGuards({"train/entropy": MetricGuard(min=0.1), "reward/mean": MetricGuard(max=1.0)})
    guards.check(1, {"train/entropy": 0.2, "reward/mean": 0.5})
    with pytest.raises(
        EarlyStopError, match=r"^step 2: train/entropy was below 0\.1 \(0\.05\) \(monitor\.guards\): the run"
    ):
        guards.check(2, {"train/entropy": 0.05, "reward/mean": 0.5})


def test_a_step_without_the_metric_does_not_count() -> None:
    guards = MetricGuards({"eval/sums/accuracy": MetricGuard(min=0.5, steps=2)})
    guards.check(1, {"eval/sums/accuracy": 0.1})
    guards.check(2, {})
    with pytest.raises(EarlyStopError, match=r"below 0\.5 in 2 step"):
        guards.check(3, {"eval/sums/accuracy": 0.2})


def test_a_guard_has_a_limit() -> None:
    with pytest.raises(ValidationError, match="set one of min, max and max_drop"):
        MetricGuard(steps=3)
