"""What the loggers leave on disk, read back by TensorBoard's own reader and by json."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from grpo_mp.monitor.curves import CURVES
from grpo_mp.monitor.loggers import (
    JsonLinesLogger,
    Logger,
    TensorBoardLogger,
    open_loggers,
    read_metrics,
    write_metrics,
)


@contextmanager
def opened(run: Path, first_step: int = 0) -> Iterator[tuple[Logger, ...]]:
    loggers = open_loggers((TensorBoardLogger, JsonLinesLogger), run, first_step, {})
    yield loggers
    for logger in loggers:
        logger.close()


def write_scalars(loggers: tuple[Logger, ...], step: int, scalars: dict[str, float]) -> None:
    write_metrics(loggers, step, scalars, {}, {})


def events(run: Path) -> EventAccumulator:
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return reader.Reload()


def curve(run: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run).Scalars(name)]


def test_charts_are_arranged_in_tensorboard(tmp_path: Path) -> None:
    with opened(tmp_path) as loggers:
        write_scalars(loggers, 1, {"reward/mean": 0.5})
    (event,) = events(tmp_path).Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(CURVES)
    (reward,) = (chart for chart in layout.category[0].chart if chart.title == "Reward")
    assert [re.fullmatch(tag, "reward/mean") is not None for tag in reward.multiline.tag] == [True]
    (terms,) = (chart for chart in layout.category[0].chart if chart.title == "Reward terms")
    assert re.fullmatch(terms.multiline.tag[0], "reward/term/boxed")


def test_all_kinds_come_back(tmp_path: Path) -> None:
    with opened(tmp_path) as loggers:
        write_scalars(loggers, 0, {"eval/arithmetic/accuracy": 0.25})
        write_metrics(
            loggers,
            1,
            {"reward/mean": 0.5, "train/lr": 1e-6},
            {"reward/values": [0.0, 0.5, 1.5, 1.5], "train/advantages": []},
            {"rollout/samples": "**two**"},
        )
        loggers[0].image(1, "eval/pass_at_k", Figure(figsize=(2.0, 1.0), dpi=100))
    assert curve(tmp_path, "reward/mean") == [(1, 0.5)]
    assert curve(tmp_path, "eval/arithmetic/accuracy") == [(0, 0.25)]
    (histogram,) = events(tmp_path).Histograms("reward/values")
    assert (histogram.histogram_value.num, histogram.histogram_value.sum) == (4, 3.5)
    (text,) = events(tmp_path).Tensors("rollout/samples/text_summary")
    assert text.tensor_proto.string_val[0] == b"**two**"
    (image,) = events(tmp_path).Images("eval/pass_at_k")
    assert (image.width, image.height) == (200, 100)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "eval/arithmetic/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "train/lr": 1e-6},
    ]


def test_events_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as loggers:
        write_scalars(loggers, 1, {"reward/mean": 0.5})
        assert curve(tmp_path, "reward/mean") == [(1, 0.5)]
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_unknown_name_writes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as loggers:
        with pytest.raises(ValueError, match="reward/maen"):
            write_scalars(loggers, 1, {"reward/mean": 0.5, "reward/maen": 0.5})
        with pytest.raises(ValueError, match="histogram"):
            write_metrics(loggers, 1, {"reward/mean": 0.5}, {"train/lr": [1.0]}, {})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert events(tmp_path).Tags()["scalars"] == []


def test_not_finite_is_null_in_json_and_kept_in_the_events(tmp_path: Path) -> None:
    with opened(tmp_path) as loggers:
        write_scalars(loggers, 1, {"train/loss": math.nan})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": null}\n'
    assert math.isnan(curve(tmp_path, "train/loss")[0][1])


def test_resume_shows_no_step_twice(tmp_path: Path) -> None:
    with opened(tmp_path) as loggers:
        for step in range(1, 6):
            write_scalars(loggers, step, {"reward/mean": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward/m')  # the process was killed inside a line
    with opened(tmp_path, first_step=4) as loggers:
        for step in range(4, 8):
            write_scalars(loggers, step, {"reward/mean": 10.0 * step})
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0)]
    assert [(line["step"], line["reward/mean"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == expected
    assert curve(tmp_path, "reward/mean") == expected


def test_fresh_start_in_a_used_folder_hides_the_old_curves(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with opened(tmp_path) as loggers:
            write_scalars(loggers, 0, {"reward/mean": value})
    assert curve(tmp_path, "reward/mean") == [(0, 2.0)]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
