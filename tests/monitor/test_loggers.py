"""What the loggers leave on disk, read back by TensorBoard's own reader and by json."""

import errno
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from grpo_mp.monitor.curves import CURVES
from grpo_mp.monitor.loggers import JsonLinesLogger, Logger, TensorBoardLogger, open_loggers, write_metrics
from grpo_mp.monitor.run_folder import read_metrics


def open_both(run: Path, first_step: int) -> tuple[Logger, ...]:
    if (run / "tensorboard").exists():  # TensorBoard orders its files by the second in their names
        time.sleep(1.0 - time.time() % 1.0)
    return open_loggers((TensorBoardLogger, JsonLinesLogger), run, first_step, {})


@contextmanager
def opened(run: Path, first_step: int = 0) -> Iterator[tuple[Logger, ...]]:
    loggers = open_both(run, first_step)
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
    assert [category.title for category in layout.category] == [*CURVES]
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    for title, shown, other in (
        ("Reward", ("reward/mean",), "reward/mean_of_terms"),
        ("Reward terms", ("reward/term/boxed",), "reward/term/a/b"),
        ("Accuracy on eval sets", ("eval/aime/accuracy", "eval/math/accuracy"), "eval/aime/accuracy_se"),
        ("pass@k on eval sets", ("eval/aime/pass_at_1", "eval/math/pass_at_16"), "eval/pass_at_k"),
        ("Groups by solve rate", ("rollout/solve_rate/none", "rollout/solve_rate/to_75"), "rollout/solve_rate"),
    ):
        assert all(any(re.fullmatch(tag, name) for tag in charts[title]) for name in shown), title
        assert not any(re.fullmatch(tag, other) for tag in charts[title]), title


def test_what_a_checkpoint_counts_on_outlives_a_kill(tmp_path: Path) -> None:
    """A job saves, begins another step, and leaves as one that is killed, which closes nothing; so do two after it."""
    for first in (1, 2, 3):
        loggers = open_both(tmp_path, first)
        for step in (first, first + 1):
            scalars = {"reward/mean": float(step)}
            values = {"reward/values": [float(step)]}
            write_metrics(loggers, step, scalars, values, {"rollout/samples": f"step {step}"})
            if step > first:
                continue
            for logger in loggers:
                logger.flush()
            done = range(1, step + 1)
            reader = events(tmp_path)
            assert curve(tmp_path, "reward/mean") == [(one, float(one)) for one in done]
            histograms = [(event.step, event.histogram_value.sum) for event in reader.Histograms("reward/values")]
            assert histograms == [(one, float(one)) for one in done]
            texts = [(e.step, e.tensor_proto.string_val[0]) for e in reader.Tensors("rollout/samples/text_summary")]
            assert sorted({*texts}) == [(one, b"step %d" % one) for one in done]  # TensorBoard purges no texts


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


def test_a_line_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is saved next counts on it."""
    synced = list[int]()
    fsync = os.fsync
    file = tmp_path / "metrics.jsonl"

    def record(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == file:
            synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    with opened(tmp_path) as loggers:
        monkeypatch.setattr(os, "fsync", record)
        for step in range(3):
            write_scalars(loggers, step, {"reward/mean": 0.5})
            assert synced[-1] == file.stat().st_size
    assert len(synced) == 3


def test_a_full_disk_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Logger):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    jsonl = JsonLinesLogger(tmp_path, 0, {})
    write_scalars((Full(), jsonl), 3, {"reward/mean": 0.5})
    assert "metrics of step 3 are not written by Full: No space left on device" in caplog.text
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [3]
