"""The lines of charts: which points are kept, what tells them apart."""

import math

from grpo_mp.monitor.curves import Curve
from grpo_mp.monitor.report.charts import DASHES, LINES
from grpo_mp.monitor.report.curves import POINTS, chart_of, downsample
from grpo_mp.monitor.run_folder import RunRecords


def test_downsampling_keeps_ends_extremes_and_gaps() -> None:
    values = [float(index % 97) for index in range(5000)]
    values[1234], values[4321], values[2500] = -50.0, 500.0, math.nan
    other = [0.0] * 5000
    other[777] = 1.0
    kept = downsample([values, other], POINTS)
    assert len(kept) <= POINTS
    assert kept == sorted({*kept})
    assert {0, 777, 1234, 2500, 4321, 4999} <= {*kept}
    assert downsample([values[:POINTS]], POINTS) == list(range(POINTS))


def test_many_runs_are_told_apart() -> None:
    """By colour and dash, also where there are more runs than colours."""
    lines = ({"step": 1.0, "a/x": 1.0, "a/y": 2.0}, {"step": 2.0, "a/x": 1.0, "a/y": 2.0})
    runs = [RunRecords(f"run{i}", {}, lines, {}, {}) for i in range(20)]
    series = chart_of(Curve("a", "", {"": "a/*"}), runs).series
    assert len(series) == len({(one.color % LINES, one.dash % len(DASHES)) for one in series}) == 40
