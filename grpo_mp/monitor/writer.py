"""Metrics of a run on disk: TensorBoard events and one JSON line per step. Only rank 0 makes a writer."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.utils.tensorboard import SummaryWriter

from grpo_mp.monitor.metrics import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MetricWriter:
    """Writes `<run>/tensorboard/` and `<run>/metrics.jsonl`, under names of the metric dictionary only.

    `first_step` is the first step this process will write. What an earlier process wrote for that step
    or a later one is dropped: cut from metrics.jsonl, and hidden by TensorBoard (its purge step).
    """

    def __init__(self, run_folder: Path, first_step: int = 0) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        lines = run_folder / "metrics.jsonl"
        cut_lines(lines, first_step)
        self._lines = lines.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step; call it once per step. Values that are not finite are null in the JSON line.

        Raises ValueError, before anything is written, for a name that the dictionary lacks.
        """
        for name in values:
            find(name, "scalar")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, **{name: n if math.isfinite(n) else None for name, n in numbers.items()}}
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._lines.flush()

    def histogram(self, step: int, name: str, values: Sequence[float] | torch.Tensor) -> None:
        """Write the distribution of `values` (any shape, finite). An empty one is left out."""
        find(name, "histogram")
        tensor = torch.as_tensor(values, dtype=torch.float32).flatten()
        if tensor.numel():
            self._events.add_histogram(name, tensor, step)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write a text that TensorBoard renders as Markdown."""
        find(name, "text")
        self._events.add_text(name, markdown, step)

    def image(self, step: int, name: str, figure: "Figure") -> None:
        """Write a figure as a picture."""
        find(name, "image")
        self._events.add_figure(name, figure, step, close=False)

    def close(self) -> None:
        self._events.close()
        self._lines.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_lines(path: Path) -> list[dict[str, float | None]]:
    """Read metrics.jsonl; a last line that a killed process left unfinished is left out."""
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def cut_lines(path: Path, first_step: int) -> None:
    """Keep the lines of steps before `first_step`. The file is replaced in one go."""
    if not path.exists():
        return
    kept = [line for line in read_lines(path) if (line["step"] or 0) < first_step]
    rewritten = path.with_suffix(".jsonl.new")
    rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(rewritten, path)
