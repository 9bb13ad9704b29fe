"""What is remembered of a metric: bounded, back to the start, without what is not finite."""

import math
from statistics import median

import pytest

from grpo_mp.monitor.history import BLOCK, MOST_BLOCKS, History, creeps, noise_of


def test_blocks_reach_back_to_the_start_and_do_not_become_more() -> None:
    history = History(10)
    for step in range(100 * BLOCK * MOST_BLOCKS):
        history.add(step, float(step))
    assert MOST_BLOCKS / 2 <= len(history.blocks) < MOST_BLOCKS
    past = history.before(2, 4, whole_run=True)
    assert past.values[0] == median(range(BLOCK))  # the first block stays as it was
    for step, value in zip(past.steps, past.values, strict=True):
        assert value == pytest.approx(step, abs=1)  # a line's mean is that of its middle


def test_no_stretch_of_a_long_run_is_left_out() -> None:
    """A peak of two blocks is in what was before, wherever it was: in a block, or where one is still to come."""
    for start in range(0, 3 * BLOCK * MOST_BLOCKS, BLOCK):
        history = History(4)
        for step in range(start + 4 * BLOCK):
            history.add(step, 9.0 if start <= step < start + 2 * BLOCK else 1.0)
        assert max(history.before(2, 2, whole_run=True).values) > 1.0


def test_what_is_not_finite_is_no_value_and_no_error() -> None:
    history = History.of([1.0, math.nan, math.inf, 3.0, -math.inf, 5.0, 7.0])
    assert history.last_finite(3) == [3.0, 5.0, 7.0]
    past = history.before(2, 10, whole_run=True)
    assert (past.steps, past.values) == ([4], [2.0])


def test_windows_are_means_before_the_last_values() -> None:
    past = History.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).before(2, 3, whole_run=False)
    assert (past.steps, past.values) == ([3, 4], [2.5, 3.5])


def test_the_value_about_a_step() -> None:
    history = History.of(map(float, range(1, 101)))
    assert history.nearest(97, within=10) == 97.0
    assert history.nearest(10, within=10) == 10.5  # a block's
    assert History.of([1.0]).nearest(1, within=10) is None


def test_noise_is_that_about_a_trend() -> None:
    assert noise_of([1.0, -1.0] * 100) == pytest.approx(math.sqrt(math.pi), rel=0.01)
    assert noise_of([0.0] * 50 + [9.0] * 50) < 0.1
    assert noise_of([1.0]) == 0.0


def test_a_step_does_not_creep() -> None:
    assert creeps([100.0 + step for step in range(13)], 0.1)
    assert not creeps([100.0, *[120.0] * 12], 0.1)
