"""The metric dictionary: every name the run may write, with unit, meaning, healthy range and what to do."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from grpo_mp.utils.errors import did_you_mean

Kind = Literal["scalar", "histogram", "text", "image"]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_UNSAFE_CHARACTERS = re.compile(r"[^\w.\-]+")


@dataclass(frozen=True)
class Metric:
    """What one metric name means, when it is healthy, and what to do when it is not.

    `name` may hold placeholders in braces: `eval/{set}/accuracy` stands for one metric per eval set.
    `healthy` is for people; rules.yaml says when a run warns. `known_as` gives the name of the same number in other
    trainers.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
    action: str
    kind: Kind = "scalar"
    known_as: str = ""

    @property
    def group(self) -> str:
        """Return the part of the name before the first slash."""
        return self.name.split("/", 1)[0]

    @property
    def is_pattern(self) -> bool:
        """Return whether the name has a place in braces, to be filled in."""
        return "{" in self.name

    def matches(self, name: str) -> bool:
        """Return whether `name` is this metric, or an instance of this pattern."""
        if not self.is_pattern:
            return name == self.name
        literal = [re.escape(part) for part in re.split(r"\{\w+\}", self.name)]
        return re.fullmatch(r"[\w.\-]+".join(literal), name) is not None


TABLE: tuple[Metric, ...] = tuple(
    Metric(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)


def metric_name(pattern: str, **parts: str) -> str:
    """Put `parts` into the placeholders of a name; characters that a name cannot hold become `_`.

    `metric_name("reward/term/{name}", name="my.py:score")` is `reward/term/my.py_score`.
    """
    return _PLACEHOLDER.sub(lambda placeholder: _UNSAFE_CHARACTERS.sub("_", parts[placeholder.group(1)]), pattern)


def find_metric(name: str, kind: Kind | None = None) -> Metric:
    """Return the row of `name`; a row without placeholders wins over a pattern.

    Raises ValueError for a name that is not in the table, or that is there as another kind.
    """
    rows = sorted((metric for metric in TABLE if metric.matches(name)), key=lambda metric: metric.is_pattern)
    if not rows:
        hint = did_you_mean(name, (metric.name for metric in TABLE))
        raise ValueError(f"metric {name!r} is not in grpo_mp.monitor.metrics.TABLE{hint}")
    if kind is not None and rows[0].kind != kind:
        raise ValueError(f"metric {name!r} is a {rows[0].kind}, not a {kind}")
    return rows[0]
