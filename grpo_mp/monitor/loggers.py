"""Loggers of metrics: TensorBoard events, JSON lines, experiment trackers (trackers.py), user-defined loggers."""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.tensorboard import SummaryWriter

from grpo_mp.config.registries import LOGGERS
from grpo_mp.monitor.curves import tensorboard_layout
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.monitor.run_folder import parse_metrics
from grpo_mp.utils.errors import DISK_ERRORS, UserError
from grpo_mp.utils.files import write_atomically
from grpo_mp.utils.redact import without_secrets

LOGGER = logging.getLogger(__name__)
PACKAGES = ("wandb", "mlflow", "trackio")  # loggers that need the package of the same name


@runtime_checkable
class Logger(Protocol):
    """Base class of loggers, which write the metrics of a run on rank 0. Override the methods that you need.

    The metric dictionary (grpo_mp/monitor/README.md) lists names and units. A full disk causes only a warning.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write all scalars of one step; called once per step. A value may be NaN or infinite."""

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Write the distribution of `values`, float32 [N], N > 0."""

    def text(self, step: int, name: str, markdown: str) -> None:
        pass

    def flush(self) -> None:
        """Write everything to disk, before a checkpoint."""

    def close(self) -> None:
        pass


class MakeLogger(Protocol):
    """A class or function that makes a logger. The arguments in `monitor.loggers` are passed by name.

    `first_step`: the first step of this process; drop the records of an earlier process from this step on.
    `settings`: all settings of the run, without secrets.
    """

    def __call__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any], /) -> Logger:
        """Return the logger."""


class TensorBoardLogger(Logger):
    """Writes `<run>/tensorboard/`. TensorBoard hides an earlier process's events from `first_step` on (purge step)."""

    def __init__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._events = SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step)
        self._events.add_custom_scalars(tensorboard_layout())  # for the tab CUSTOM SCALARS

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        self._events.add_histogram(name, values, step)

    def text(self, step: int, name: str, markdown: str) -> None:
        self._events.add_text(name, markdown, step)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class JsonLinesLogger(Logger):
    """Appends the scalars of each step as a line of `<run>/metrics.jsonl`; NaN and infinity become null."""

    def __init__(self, run_folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._path = run_folder / "metrics.jsonl"
        drop_later_steps(self._path, first_step)
        self._path.touch()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, **{name: n if math.isfinite(n) else None for name, n in numbers.items()}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def drop_later_steps(path: Path, first_step: int) -> None:
    """Remove the lines of `first_step` and later steps from a metrics file, atomically."""
    if path.exists():
        lines = [line for text in path.read_bytes().splitlines() if (line := parse_metrics(text)) is not None]
        kept = [json.dumps(line) + "\n" for line in lines if int(line["step"] or 0) < first_step]
        write_atomically(path, "".join(kept))


def load_loggers(loggers: Mapping[str, Mapping[str, Any]]) -> tuple[MakeLogger, ...]:
    """Return the class or function that makes each logger in `monitor.loggers`."""
    for name in loggers:
        if name in PACKAGES and not ((spec := find_spec(name)) and spec.origin):  # a plain folder: no origin
            raise UserError(f"monitor.loggers: {name} is not installed: `pip install {name}`, or leave the logger out")
    return tuple(LOGGERS.resolve(name, "monitor.loggers", args) for name, args in loggers.items())


def open_loggers(
    make_loggers: Iterable[MakeLogger], run_folder: Path, first_step: int, settings: Mapping[str, Any]
) -> tuple[Logger, ...]:
    """Make the loggers; secrets in `settings` are not passed to them."""
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
    """Write the metrics of one step to each logger; log a warning if the disk is full.

    Raises ValueError before any write if the dictionary lacks a name or lists it with another kind.
    """
    for kind, names in (("scalar", scalars), ("histogram", histograms), ("text", texts)):
        for name in names:
            find_metric(name, kind)  # type: ignore[arg-type]
    tensors = {name: torch.as_tensor(values, dtype=torch.float32).flatten() for name, values in histograms.items()}
    for logger in loggers:
        try:
            logger.scalars(step, scalars)
            for name, tensor in tensors.items():
                if tensor.numel():
                    logger.histogram(step, name, tensor)
            for name, text in texts.items():
                logger.text(step, name, text)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            LOGGER.warning("metrics of step %d are not written by %s: %s", step, type(logger).__name__, error.strerror)
