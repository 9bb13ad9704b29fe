"""The metric dictionary: every name that a run may write, with unit, meaning and healthy range."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from grpo_mp.utils.errors import did_you_mean

Kind = Literal["scalar", "histogram", "text"]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_UNSAFE_CHARACTERS = re.compile(r"[^\w.\-]+")


@dataclass(frozen=True)
class Metric:
    """A row of metrics.yaml. `name` may contain placeholders: `eval/{set}/accuracy` is one metric per eval set.

    `healthy`: usual range, for readers only; rules.yaml defines the warnings. `known_as`: names in other trainers.
    """

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    kind: Kind = "scalar"
    known_as: str = ""

    @property
    def group(self) -> str:
        return self.name.split("/", 1)[0]

    def matches(self, name: str) -> bool:
        """Return whether `name` equals this metric's name or matches its placeholders."""
        if "{" not in self.name:
            return name == self.name
        literal = [re.escape(part) for part in re.split(r"\{\w+\}", self.name)]
        return re.fullmatch(r"[\w.\-]+".join(literal), name) is not None


TABLE: tuple[Metric, ...] = tuple(
    Metric(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)


def metric_name(pattern: str, **parts: str) -> str:
    """Fill the placeholders of a metric name; in `parts`, replace all but letters, digits and `_.-` by `_`."""
    return _PLACEHOLDER.sub(lambda placeholder: _UNSAFE_CHARACTERS.sub("_", parts[placeholder.group(1)]), pattern)


def find_metric(name: str, kind: Kind | None = None) -> Metric:
    """Return the table row of a metric. A row without placeholders takes precedence over a pattern.

    Raises ValueError if the table has no row for `name`, or a row of another kind.
    """
    rows = sorted((metric for metric in TABLE if metric.matches(name)), key=lambda metric: "{" in metric.name)
    if not rows:
        hint = did_you_mean(name, (metric.name for metric in TABLE))
        raise ValueError(f"metric {name!r} is not in grpo_mp.monitor.metrics.TABLE{hint}")
    if kind is not None and rows[0].kind != kind:
        raise ValueError(f"metric {name!r} is a {rows[0].kind}, not a {kind}")
    return rows[0]
