"""The points of charts that are kept."""

import math

from grpo_mp.monitor.report.curves import POINTS, downsample


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
