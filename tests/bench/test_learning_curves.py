"""The bench of learning curves: its presets differ, and its picture has a line of each with the band of the seeds."""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest

from grpo_mp.config import load_settings
from grpo_mp.monitor.report.charts import DASHES, LINES
from tests.bench.learning_curves import COLUMNS, PRESETS, always, charts
from tests.bench.picture import write_charts
from tests.bench.quickstart_run import CONFIG

ACCURACY = COLUMNS["accuracy"]


def test_ten_presets_differ_in_their_settings_alone() -> None:
    def settings(preset: str) -> dict[str, Any]:
        return load_settings(Path(CONFIG), [f"algorithm={preset}", *always()]).model_dump(mode="json")

    resolved = {preset: settings(preset) for preset in PRESETS}
    algorithms = [str(one.pop("algorithm") | {"preset": ""}) for one in resolved.values()]
    assert len(PRESETS) == len({*algorithms}) == 10
    resolved["dapo"]["reward"]["overlong"] = resolved["grpo"]["reward"]["overlong"]  # a part of it
    assert all(one == resolved["grpo"] for one in resolved.values())
    assert resolved["grpo"]["training"]["updates_per_step"] > 1


def test_lines_are_means_over_seeds_with_their_deviation() -> None:
    seeds = [
        [{"step": 0, ACCURACY: low}, {"step": 1}, {"step": 10, ACCURACY: high}]
        for low, high in ((0.2, 0.5), (0.4, 0.9))
    ]
    accuracy, *_ = charts({"grpo": seeds, "dapo": seeds[:1]})
    both, one = accuracy.series
    assert both.x == one.x == (0, 10)
    assert both.values == pytest.approx((fmean((0.2, 0.4)), fmean((0.5, 0.9))))
    assert both.high[1] - both.values[1] == both.values[1] - both.low[1] == pytest.approx(stdev((0.5, 0.9)))
    assert (one.values, one.low, one.high) == ((0.2, 0.5), (), ())


def test_every_preset_has_a_line_of_its_own_in_picture_and_key(tmp_path: Path) -> None:
    drawn = charts({preset: [[{"step": 1, ACCURACY: 0.5}]] for preset in PRESETS})
    assert len({(one.color % LINES, one.dash % len(DASHES)) for one in drawn[0].series}) == len(PRESETS)
    write_charts(drawn, tmp_path / "curves.svg")
    texts = [text.strip() for text in ElementTree.parse(tmp_path / "curves.svg").getroot().itertext()]
    assert [texts.count(name) for name in (*PRESETS, *COLUMNS)] == [1] * (len(PRESETS) + len(COLUMNS))
