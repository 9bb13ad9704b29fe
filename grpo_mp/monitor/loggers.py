"""Where metrics go: TensorBoard events, JSON lines, an experiment tracker (trackers.py), or a user's own logger."""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

from grpo_mp.config.registries import LOGGERS
from grpo_mp.monitor.curves import tensorboard_layout
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import PatientFile, write_atomically
from grpo_mp.utils.metric_lines import parse_metrics
from grpo_mp.utils.redact import without_secrets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOGGER = logging.getLogger(__name__)
MOST_NAMED = 5  # damaged lines
PACKAGES = ("wandb", "mlflow", "trackio")  # of the loggers of these names


@runtime_checkable
class Logger(Protocol):
    """Writes what a run measures, on rank 0 only. Inherit from it, and write the methods that you need.

    Names are those of the metric dictionary, with their units (grpo_mp/monitor/README.md).
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write all scalars of one step; called once per step. A value may be NaN or infinite."""

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Write the distribution of `values`, float32 [N], N > 0."""

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write a text in Markdown."""

    def image(self, step: int, name: str, figure: "Figure") -> None:
        """Write a figure of matplotlib."""

    def flush(self) -> None:
        """Bring what was written to disk, before a checkpoint that counts on it. Raises OSError where that fails."""

    def close(self) -> None:
        """Finish what was written, at the end of the run."""


class MakeLogger(Protocol):
    """Makes a logger: a class, or a function.

    `first_step`: the first step that this process will write; what an earlier process wrote for it or for a later one
    should be dropped. `settings`: all of the run, as in settings.yaml, but for `without_secrets`. The arguments in
    `monitor.loggers` come by name.
    """

    def __call__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any], /) -> Logger:
        """Return the logger."""


class _EventWriter:
    """Writes events in TensorBoard's format, as its own writer does, but where the disk is full, later."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = PatientFile(folder / name, durable=True)
        self._records = RecordWriter(self._file)
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def add_event(self, event: Event) -> None:
        """Buffer an event until the next `flush`."""
        self._records.write(event.SerializeToString())

    def flush(self) -> OSError | None:
        """Write the buffered events, or return the disk's error."""
        if error := self._file.flush():
            LOGGER.info("%s: %s: its events are written when there is room", self._folder, error.strerror)
        return error

    def close(self) -> None:
        """Write what the disk takes, and close the file."""
        self._file.close()


class _FileWriter(FileWriter):
    def __init__(self, folder: Path) -> None:
        self.event_writer = _EventWriter(folder)


class _Events(SummaryWriter):
    def _get_file_writer(self) -> Any:
        writer: Any = self.file_writer
        if writer is None:
            self.file_writer = writer = _FileWriter(Path(self.log_dir))  # type: ignore[assignment]
            self.all_writers = {self.log_dir: writer}  # type: ignore[assignment]
            writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), self.purge_step)
            writer.flush()
        return writer

    def flush_pending(self) -> OSError | None:
        """Write the pending events, or return the disk's error, which `flush` does not."""
        error: OSError | None = self._get_file_writer().event_writer.flush()
        return error


class TensorBoardLogger(Logger):
    """Writes `<run>/tensorboard/`; TensorBoard hides earlier events of `first_step` and later (its purge step)."""

    def __init__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._events = _Events(str(run_folder / "tensorboard"), purge_step=first_step)
        self._events.add_custom_scalars(tensorboard_layout())  # of its tab CUSTOM SCALARS

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one curve per name."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Write one step of a histogram."""
        self._events.add_histogram(name, values, step)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write one step of a text."""
        self._events.add_text(name, markdown, step)

    def image(self, step: int, name: str, figure: "Figure") -> None:
        """Write a figure as an image."""
        self._events.add_figure(name, figure, step, close=False)

    def flush(self) -> None:
        """Write what came after the step's scalars, and what the disk did not take before."""
        if error := self._events.flush_pending():
            raise OSError(error.errno, error.strerror, self._events.log_dir)

    def close(self) -> None:
        """Close the event file."""
        self._events.close()


class JsonLinesLogger(Logger):
    """Writes the scalars of each step as one line of `<run>/metrics.jsonl`; those that are not finite are null."""

    def __init__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._path = run_folder / "metrics.jsonl"
        drop_later_steps(self._path, first_step)
        self._lines = PatientFile(self._path, durable=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the line of the step; where the disk is full, with that of a later one."""
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, **{name: n if math.isfinite(n) else None for name, n in numbers.items()}}
        self._lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        if error := self._lines.flush():
            LOGGER.warning("%s: %s: step %d is written when there is room", self._path, error.strerror, step)

    def flush(self) -> None:
        """Write what the disk did not take before."""
        if error := self._lines.flush():
            raise OSError(error.errno, error.strerror, str(self._path))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Read metrics.jsonl; a last line that a killed process left unfinished is left out, and, with a warning, others
    that are no line of a step: a host that went down or a bad disk left them."""
    if not path.exists():
        return []
    *complete, _ = path.read_bytes().split(b"\n")
    lines = [parse_metrics(line) for line in complete]
    if damaged := [number for number, line in enumerate(lines, 1) if line is None]:
        LOGGER.warning("%s: line %s is damaged and left out", path, ", ".join(map(str, damaged[:MOST_NAMED])))
    return [line for line in lines if line is not None]


def drop_later_steps(path: Path, first_step: int) -> None:
    """Keep the lines of steps before `first_step`. The file is replaced in one go."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if (line["step"] or 0) < first_step]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def load_loggers(loggers: Mapping[str, Mapping[str, Any]]) -> tuple[MakeLogger, ...]:
    """Return what makes the loggers that `monitor.loggers` names. Raises UserError where one cannot be loaded."""
    for name in loggers:
        if name in PACKAGES and not ((spec := find_spec(name)) and spec.origin):  # a folder is a package without origin
            raise UserError(f"monitor.loggers: {name} is not installed: `pip install {name}`, or leave the logger out")
    return tuple(LOGGERS.resolve(name, "monitor.loggers", args) for name, args in loggers.items())


def open_loggers(
    make_loggers: Iterable[MakeLogger], run_folder: Path, first_step: int, settings: Mapping[str, Any]
) -> tuple[Logger, ...]:
    """Make the loggers, with `settings` without secrets. Raises UserError for one that lacks a method of `Logger`."""
    public = without_secrets(settings)
    loggers = tuple(make(run_folder, first_step, public) for make in make_loggers)
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise UserError(
                f"monitor.loggers: {type(logger).__name__} lacks a method: inherit from grpo_mp.monitor.loggers.Logger"
            )
    return loggers


def write_metrics(
    loggers: Iterable[Logger],
    step: int,
    scalars: Mapping[str, float],
    histograms: Mapping[str, Sequence[float] | torch.Tensor],
    texts: Mapping[str, str],
) -> None:
    """Hand a step's metrics to each logger; call it once per step. A histogram of no values is left out.

    Raises ValueError, before anything is written, for a name that the dictionary lacks, or has as another kind.
    """
    for name in scalars:
        find_metric(name, "scalar")
    for name in histograms:
        find_metric(name, "histogram")
    for name in texts:
        find_metric(name, "text")
    tensors = {name: torch.as_tensor(values, dtype=torch.float32).flatten() for name, values in histograms.items()}
    for logger in loggers:
        logger.scalars(step, scalars)
        for name, tensor in tensors.items():
            if tensor.numel():
                logger.histogram(step, name, tensor)
        for name, text in texts.items():
            logger.text(step, name, text)
