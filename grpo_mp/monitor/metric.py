"""One row of the metric dictionary."""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["scalar", "histogram", "text", "image"]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_UNSAFE_CHARACTERS = re.compile(r"[^\w.\-]+")


@dataclass(frozen=True)
class Metric:
    """What one metric name means, when it is healthy, and what to do when it is not.

    `name` may hold placeholders in braces: `eval/{set}/accuracy` stands for one metric per eval set.
    `low` and `high` bound the healthy range where a number can say it; outside it a step is worth a warning.
    `known_as` gives the name of the same number in other trainers.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
    action: str
    kind: Kind = "scalar"
    low: float | None = None
    high: float | None = None
    known_as: str = ""

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.split("/", 1)[0]

    @property
    def is_pattern(self) -> bool:
        return "{" in self.name

    def matches(self, name: str) -> bool:
        """Check whether `name` is this metric, or an instance of this pattern."""
        if not self.is_pattern:
            return name == self.name
        literal = [re.escape(part) for part in re.split(r"\{\w+\}", self.name)]
        return re.fullmatch(r"[\w.\-]+".join(literal), name) is not None

    def is_healthy(self, value: float) -> bool:
        """Check whether `value` lies in the healthy range; NaN never does where there is one."""
        above_low = self.low is None or value >= self.low
        below_high = self.high is None or value <= self.high
        return above_low and below_high


def fill(pattern: str, **parts: str) -> str:
    """Put `parts` into the placeholders of a name; characters that a name cannot hold become `_`.

    `fill("reward/part/{name}", name="my.py:score")` is `reward/part/my.py_score`.
    """
    return _PLACEHOLDER.sub(lambda placeholder: _UNSAFE_CHARACTERS.sub("_", parts[placeholder.group(1)]), pattern)
