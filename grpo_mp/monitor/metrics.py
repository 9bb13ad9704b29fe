"""The metric dictionary: every name the run may write, with unit, meaning, healthy range and what to do."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from grpo_mp.errors import nearest
from grpo_mp.monitor.metric import Kind, Metric, fill

__all__ = ["TABLE", "Kind", "Metric", "RangeWatch", "fill", "find", "markdown", "warnings"]

TABLE: tuple[Metric, ...] = tuple(
    Metric(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)


def find(name: str, kind: Kind | None = None) -> Metric:
    """Return the row of `name`; a row without placeholders wins over a pattern.

    Raises ValueError for a name that is not in the table, or that is there as another kind.
    """
    rows = sorted((metric for metric in TABLE if metric.matches(name)), key=lambda metric: metric.is_pattern)
    if not rows:
        hint = nearest(name, (metric.name for metric in TABLE))
        raise ValueError(f"metric {name!r} is not in grpo_mp.monitor.metrics.TABLE{hint}")
    if kind is not None and rows[0].kind != kind:
        raise ValueError(f"metric {name!r} is a {rows[0].kind}, not a {kind}")
    return rows[0]


def warnings(scalars: Mapping[str, float]) -> dict[str, str]:
    """Return, by name, one sentence for each value outside its healthy range, with what to do about it."""
    sentences = {}
    for name, value in scalars.items():
        metric = find(name, "scalar")
        if not metric.is_healthy(value):
            sentences[name] = f"{name} is {value:.4g} (healthy: {metric.healthy}). {metric.action}"
    return sentences


class RangeWatch:
    """Warns of a metric when it leaves its healthy range, and not again until it has returned."""

    def __init__(self) -> None:
        self._outside: set[str] = set()

    def new_warnings(self, scalars: Mapping[str, float]) -> list[str]:
        """Return a warning for each metric of this step that was in its range, or unknown, before."""
        current = warnings(scalars)
        new = [warning for name, warning in current.items() if name not in self._outside]
        self._outside = (self._outside - scalars.keys()) | current.keys()
        return new


def markdown() -> str:
    """Render the table as Markdown, one section per group."""
    groups = dict.fromkeys(metric.group for metric in TABLE)
    return "\n".join(_section(group) for group in groups)


def _section(group: str) -> str:
    rows = [_row(metric) for metric in TABLE if metric.group == group]
    head = ["| name | unit | meaning | healthy | what to do | known as |", "|---|---|---|---|---|---|"]
    return "\n".join([f"### {group}/", "", *head, *rows, ""])


def _row(metric: Metric) -> str:
    unit = metric.unit if metric.kind == "scalar" else f"{metric.unit} ({metric.kind})"
    cells = (f"`{metric.name}`", unit, metric.meaning, metric.healthy, metric.action, metric.known_as)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
