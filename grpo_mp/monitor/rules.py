"""Warnings of a run, found in its metrics by one table of rules (rules.yaml). Pure."""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

MetricLine = Mapping[str, float | None]  # as in metrics.jsonl: `step` and metrics by name; None: not finite


@dataclass(frozen=True)
class Condition:
    """What must hold of a metric's last values. All that is given must.

    What is not finite is above every limit and below none: an entropy of NaN is no small entropy.

    `above`, `below`: each of the last `steps` values is. The others compare the mean of these values with the means of
    as many at most `within` values before: `rises_to` and `falls_to` times the least or the largest of them,
    `rises_by` and `falls_by` by so much. `creeps`: it rises by this share over the last `within` values, and by half
    an even part of that in each third of them.
    """

    above: float | None = None
    below: float | None = None
    rises_to: float | None = None
    falls_to: float | None = None
    rises_by: float | None = None
    falls_by: float | None = None
    creeps: float | None = None
    steps: int = 5
    within: int = 40

    @property
    def memory(self) -> int:
        """Return how many values it looks back on."""
        changes = (self.rises_to, self.falls_to, self.rises_by, self.falls_by, self.creeps)
        return self.steps + (0 if all(change is None for change in changes) else self.within)

    def find(self, values: Sequence[float]) -> "Evidence | None":
        """Return what was seen where the condition holds for the last of `values`, oldest first; else None."""
        last = values[-self.steps :]
        if len(last) < self.steps:
            return None
        now, finite = fmean(last), all(map(math.isfinite, last))
        limits = [] if self.above is None else [not finite or min(last) > self.above]
        limits += [] if self.below is None else [finite and max(last) < self.below]
        if not all(limits):
            return None
        if self.memory == self.steps:
            return Evidence(now, now)
        return self._find_change(values[-self.steps - self.within :], now)

    def _find_change(self, values: Sequence[float], now: float) -> "Evidence | None":
        means = [fmean(values[end - self.steps : end]) for end in range(self.steps, len(values) - self.steps + 1)]
        if not means or not all(map(math.isfinite, (*means, now))):
            return None
        low, high = min(means), max(means)
        found = {
            "rises_to": (low, lambda share: now > share * low),
            "falls_to": (high, lambda share: now < share * high),
            "rises_by": (low, lambda change: now > low + change),
            "falls_by": (high, lambda change: now < high - change),
            "creeps": (values[0], lambda share: len(values) > self.within and _creeps(values, share)),
        }
        asked = {name: limit for name in found if (limit := vars(self)[name]) is not None}
        holds = all(found[name][1](limit) for name, limit in asked.items())
        return Evidence(now, found[next(iter(asked))][0]) if holds else None


def _creeps(values: Sequence[float], share: float) -> bool:
    third = len(values) // 3
    ends = [fmean(values[end : end + 1 + third // 4]) for end in (0, third, 2 * third)] + [values[-1]]
    rises = [after - before for before, after in pairwise(ends)]
    return sum(rises) > share * abs(ends[0]) and all(rise > sum(rises) / 6 for rise in rises)


@dataclass(frozen=True)
class Evidence:
    """A metric's mean now, and before where the condition is about a change."""

    value: float
    before: float


@dataclass(frozen=True)
class Rule:
    """A row of the table. `when`: conditions by metric, `*` in a name stands for any part of one; all must hold.

    The first is the evidence: each metric that it matches is a finding of its own, but those that `but` names.
    `sentence` may hold {value} and {before} of it, and {name}, what `*` stands for. `weight`, 1 to 100, says how much
    of the run is at stake; `source` where the sickness and its limit are described. A step with a metric of `unless` is
    none of this kind.
    """

    name: str
    weight: int
    when: Mapping[str, Condition]
    sentence: str
    meaning: str
    action: str
    setting: str
    source: str
    but: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Rule":
        """Make a rule of a row of the file; `steps` and `within` of the row are those of its conditions."""
        window = {name: row[name] for name in ("steps", "within") if name in row}
        when = {metric: Condition(**(window | condition)) for metric, condition in row["when"].items()}
        fields = {name: value for name, value in row.items() if name not in window}
        return cls(**(fields | {"when": when} | {name: tuple(row.get(name, ())) for name in ("but", "unless")}))

    def matches(self, name: str) -> str | None:
        """Return what `*` of the first metric stands for in `name`, "" without one; None where it is another metric."""
        found = _pattern(next(iter(self.when))).fullmatch(name)
        return None if found is None or name in self.but else "".join(found.groups())


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("([^/]+)".join(map(re.escape, name.split("*"))))


RULES: tuple[Rule, ...] = tuple(
    Rule.from_row(row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Finding:
    """What a rule found in a metric: from `first_step` on, last at `last_step`, at `steps` of the steps between.

    `sentence` says what was seen last, `meaning` what that is, `action` what to try, by which `setting`.
    """

    rule: str
    weight: int
    metric: str
    sentence: str
    meaning: str
    action: str
    setting: str
    source: str
    first_step: int
    last_step: int
    steps: int = 1

    @property
    def text(self) -> str:
        """Return the finding in two sentences, for a terminal."""
        return f"{self.sentence}. {self.action} [{self.setting}; {self.source}]"


@dataclass
class RuleWatch:
    """Follows a run step by step, with the last values of each metric that a rule looks at."""

    rules: Sequence[Rule] = RULES
    found: dict[tuple[str, str], Finding] = field(default_factory=dict)  # by rule and metric

    def __post_init__(self) -> None:
        memory = max((one.memory for rule in self.rules for one in rule.when.values()), default=1)
        self._values: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=memory))
        self._matching: dict[str, list[tuple[Rule, str]]] = {}  # rules by the name of their first metric
        self._holding: set[tuple[str, str]] = set()

    def step(self, line: MetricLine) -> list[Finding]:
        """Add the line of a step; return what holds now and did not at the step before, by weight."""
        step, new = int(line.get("step") or 0), []
        for name, value in line.items():
            self._values[name].append(math.nan if value is None else float(value))
        for name in line:
            for rule, part in self._rules_of(name):
                finding, key = self._find(rule, name, part, step), (rule.name, name)
                finding = None if any(other in line for other in rule.unless) else finding
                if finding is None:
                    self._holding.discard(key)
                    continue
                if key not in self._holding:
                    new.append(finding)
                self._holding.add(key)
                earlier = self.found.get(key, replace(finding, steps=0))
                self.found[key] = replace(finding, first_step=earlier.first_step, steps=earlier.steps + 1)
        return sorted(new, key=lambda one: -one.weight)

    def _rules_of(self, name: str) -> list[tuple[Rule, str]]:
        if name not in self._matching:
            found = ((rule, rule.matches(name)) for rule in self.rules)
            self._matching[name] = [(rule, part) for rule, part in found if part is not None]
        return self._matching[name]

    def _find(self, rule: Rule, name: str, part: str, step: int) -> Finding | None:
        first, *others = rule.when.items()
        evidence = first[1].find(list(self._values[name]))
        if evidence is None or not all(self._holds(*other) for other in others):
            return None
        sentence = rule.sentence.format(value=evidence.value, before=evidence.before, name=part)
        texts = (sentence, rule.meaning, rule.action, rule.setting, rule.source)
        return Finding(rule.name, rule.weight, name, *texts, first_step=step, last_step=step)

    def _holds(self, pattern: str, condition: Condition) -> bool:
        """Return whether the condition holds for any metric of this name."""
        names = [name for name in self._values if _pattern(pattern).fullmatch(name)]
        return any(condition.find(list(self._values[name])) is not None for name in names)


def find_warnings(lines: Iterable[MetricLine], rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """Return what the rules find in a run's metrics, the lines of metrics.jsonl in order of steps; heaviest first."""
    watch = RuleWatch(rules)
    for line in lines:
        watch.step(line)
    return tuple(sorted(watch.found.values(), key=lambda one: (-one.weight, one.first_step, one.metric)))
