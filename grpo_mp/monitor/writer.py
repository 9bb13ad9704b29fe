"""Metrics of a run: every logger gets them, under names of the metric dictionary only. Only rank 0 makes a writer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from grpo_mp.errors import UserError
from grpo_mp.monitor.loggers import JsonLinesLogger, Logger, MakeLogger, TensorBoardLogger
from grpo_mp.monitor.metrics import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_LOGGERS: tuple[MakeLogger, ...] = (TensorBoardLogger, JsonLinesLogger)


class MetricWriter:
    """Hands metrics to each logger. `first_step`: the first step that this process will write."""

    def __init__(
        self,
        run_folder: Path,
        first_step: int = 0,
        make_loggers: Sequence[MakeLogger] = DEFAULT_LOGGERS,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the loggers. Raises UserError for one that lacks a method of `Logger`."""
        run_folder.mkdir(parents=True, exist_ok=True)
        self._loggers = tuple(make(run_folder, first_step, settings or {}) for make in make_loggers)
        for logger in self._loggers:
            if not isinstance(logger, Logger):
                raise UserError(
                    f"monitor.loggers: {type(logger).__name__} lacks a method: inherit from "
                    "grpo_mp.monitor.loggers.Logger"
                )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step; call it once per step.

        Raises ValueError, before anything is written, for a name that the dictionary lacks.
        """
        for name in values:
            find(name, "scalar")
        for logger in self._loggers:
            logger.scalars(step, values)

    def histogram(self, step: int, name: str, values: Sequence[float] | torch.Tensor) -> None:
        """Write the distribution of `values` (any shape, finite). An empty one is left out."""
        find(name, "histogram")
        tensor = torch.as_tensor(values, dtype=torch.float32).flatten()
        for logger in self._loggers if tensor.numel() else ():
            logger.histogram(step, name, tensor)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write a text in Markdown."""
        find(name, "text")
        for logger in self._loggers:
            logger.text(step, name, markdown)

    def image(self, step: int, name: str, figure: "Figure") -> None:
        """Write a figure as a picture."""
        find(name, "image")
        for logger in self._loggers:
            logger.image(step, name, figure)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
