"""Published schedules beside simulated ones: what the page says of their errors holds."""

from itertools import islice

import pytest

from grpo_mp.simulation.published import Comparison, read_comparisons


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    """Simulate verl's staleness table, the first of the file."""
    return list(islice(read_comparisons(), 4))


def test_the_gains_by_staleness_are_as_published(comparisons: list[Comparison]) -> None:
    assert {item.name for item in comparisons} == {"verl, Qwen2.5-Math-7B, 128 H20"}
    stale = [item for item in comparisons if item.scenario.max_staleness]
    assert [item.scenario.max_staleness for item in stale] == [0.1, 0.3, 0.5]
    assert all(abs(item.error) < 0.1 for item in stale)
    assert stale[0].simulated_s > 1.1 * stale[1].simulated_s
    assert stale[1].simulated_s == pytest.approx(stale[2].simulated_s, rel=0.05)


def test_errors_are_those_of_the_speed_ups(comparisons: list[Comparison]) -> None:
    for item in comparisons:
        *_, measured, simulated, error = item.cells
        assert float(error.rstrip("%")) / 100 == pytest.approx(float(simulated) / float(measured) - 1, abs=0.02)
