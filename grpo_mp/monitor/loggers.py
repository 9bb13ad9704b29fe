"""Where metrics go: TensorBoard events, JSON lines, an experiment tracker (trackers.py), or a user's own logger."""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch.utils.tensorboard import SummaryWriter

from grpo_mp.config.registries import LOGGERS
from grpo_mp.monitor.curves import tensorboard_layout
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.utils.errors import DISK_ERRORS, UserError
from grpo_mp.utils.files import write_atomically
from grpo_mp.utils.metric_lines import parse_metrics
from grpo_mp.utils.redact import without_secrets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOGGER = logging.getLogger(__name__)
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


class TensorBoardLogger(Logger):
    """Writes `<run>/tensorboard/`; TensorBoard hides earlier events of `first_step` and later (its purge step)."""

    def __init__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._events = SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step)
        self._events.add_custom_scalars(tensorboard_layout())  # for the tab CUSTOM SCALARS

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one curve per name."""
        with _disk_may_be_full("TensorBoard"):
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Write one step of a histogram."""
        with _disk_may_be_full("TensorBoard"):
            self._events.add_histogram(name, values, step)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write one step of a text."""
        with _disk_may_be_full("TensorBoard"):
            self._events.add_text(name, markdown, step)

    def image(self, step: int, name: str, figure: "Figure") -> None:
        """Write a figure as an image."""
        with _disk_may_be_full("TensorBoard"):
            self._events.add_figure(name, figure, step, close=False)

    def flush(self) -> None:
        """Write the events that came after the step's scalars."""
        with _disk_may_be_full("TensorBoard"):
            self._events.flush()

    def close(self) -> None:
        """Close the event file."""
        with _disk_may_be_full("TensorBoard"):
            self._events.close()


class JsonLinesLogger(Logger):
    """Appends the scalars of each step as a line of `<run>/metrics.jsonl`; values that are not finite are null."""

    def __init__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._path = run_folder / "metrics.jsonl"
        drop_later_steps(self._path, first_step)
        self._path.touch()
        self._unwritten = b""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the line of the step; it is on disk on return. If the disk is full, it is tried again next step."""
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, **{name: n if math.isfinite(n) else None for name, n in numbers.items()}}
        self._unwritten += json.dumps(line, allow_nan=False).encode() + b"\n"
        with _disk_may_be_full(f"{self._path}: step {step}"):
            try:
                with self._path.open("ab") as file:
                    file.write(self._unwritten)
                    file.flush()
                    os.fsync(file.fileno())
                self._unwritten = b""
            except OSError:
                # A part may be written: end that line. The reader takes the last of two lines of a step.
                self._unwritten = b"\n" + self._unwritten.lstrip(b"\n")
                raise


@contextmanager
def _disk_may_be_full(what: str) -> Iterator[None]:
    """Turn an error of the disk into a warning: metrics are no reason to end a run."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        LOGGER.warning("%s is not written: %s", what, error.strerror)


def drop_later_steps(path: Path, first_step: int) -> None:
    """Keep the lines of steps before `first_step`. The file is replaced in one go."""
    if path.exists():
        lines = [line for text in path.read_bytes().splitlines() if (line := parse_metrics(text)) is not None]
        kept = [json.dumps(line) + "\n" for line in lines if int(line["step"] or 0) < first_step]
        write_atomically(path, "".join(kept))


def load_loggers(loggers: Mapping[str, Mapping[str, Any]]) -> tuple[MakeLogger, ...]:
    """Return what makes the loggers that `monitor.loggers` names."""
    for name in loggers:
        if name in PACKAGES and not ((spec := find_spec(name)) and spec.origin):  # a folder is a package without origin
            raise UserError(f"monitor.loggers: {name} is not installed: `pip install {name}`, or leave the logger out")
    return tuple(LOGGERS.resolve(name, "monitor.loggers", args) for name, args in loggers.items())


def open_loggers(
    make_loggers: Iterable[MakeLogger], run_folder: Path, first_step: int, settings: Mapping[str, Any]
) -> tuple[Logger, ...]:
    """Make the loggers, with `settings` without secrets."""
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
