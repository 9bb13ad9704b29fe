"""Warnings of a run: the rules of rules.yaml, applied to the metrics of the last steps."""

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mp.utils.findings import Finding, Level

MetricLine = Mapping[str, float | None]  # `step` and the metrics of the step; None or NaN: not finite
ERROR_WEIGHT = 80  # findings of at least this weight are errors: the result of the run is unusable


@dataclass(frozen=True)
class Condition:
    """A condition on the last `steps` values of a metric. Each of these values must satisfy all given limits.

    `above`, `below`: absolute limits. `rises_to`, `rises_by`: the values exceed a baseline by this factor or amount;
    the baseline is the smallest mean of `steps` consecutive values among the `within` values before. `falls_to`,
    `falls_by`: likewise below the largest such mean. NaN and infinity satisfy `above`; the other limits skip them.
    `optional`: the condition also holds for a run without the metric.
    """

    above: float | None = None
    below: float | None = None
    rises_to: float | None = None
    rises_by: float | None = None
    falls_to: float | None = None
    falls_by: float | None = None
    optional: bool = False
    steps: int = 5
    within: int = 40

    def find(self, values: Sequence[float]) -> tuple[float, float] | None:
        """Return the mean of the last values and the baseline, or None if the condition does not hold.

        Without a baseline the mean is returned twice.
        """
        last = values[-self.steps :]
        if len(last) < self.steps:
            return None
        if self.above is not None and not all(value > self.above for value in last if math.isfinite(value)):
            return None
        is_change = any(limit is not None for limit in (self.rises_to, self.rises_by, self.falls_to, self.falls_by))
        if self.below is None and not is_change:
            shown = mean(list(filter(math.isfinite, last)) or last)
            return shown, shown
        recent = list(filter(math.isfinite, values[-2 * self.steps :]))[-self.steps :]
        if len(recent) < self.steps or (self.below is not None and max(recent) >= self.below):
            return None
        return self._find_change(recent, list(filter(math.isfinite, values))) if is_change else (mean(recent),) * 2

    def _find_change(self, recent: Sequence[float], finite: Sequence[float]) -> tuple[float, float] | None:
        earlier = finite[: -self.steps][-self.within :]
        means = [mean(earlier[end - self.steps : end]) for end in range(self.steps, len(earlier) + 1)]
        if not means:
            return None
        least = min(means)
        largest = max(means)
        rises = (
            (self.rises_to is None or min(recent) > self.rises_to * least)
            and (self.rises_by is None or min(recent) > least + self.rises_by)
            and (self.falls_to is None or max(recent) < self.falls_to * largest)
            and (self.falls_by is None or max(recent) < largest - self.falls_by)
        )
        is_rise = self.rises_to is not None or self.rises_by is not None
        return (mean(recent), least if is_rise else largest) if rises else None


def mean(values: Sequence[float]) -> float:
    """Return the mean. Unlike statistics.fmean, accept infinities of both signs."""
    return sum(values) / len(values)


@dataclass(frozen=True)
class Rule:
    """A row of rules.yaml: conditions by metric name, all of which must hold. `*` matches one part of a name.

    Each metric that matches the first name, except those in `but`, gives a separate finding. `sentence` may contain
    {value} and {before}, the result of Condition.find for this metric, and {name}, the text that `*` matches. Steps
    that have a metric of `unless` are skipped.
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
        """Make a rule from a row of rules.yaml; the row's `steps` and `within` are defaults of its conditions."""
        window = {name: row[name] for name in ("steps", "within") if name in row}
        when = {metric: Condition(**(window | condition)) for metric, condition in row["when"].items()}
        fields = {name: value for name, value in row.items() if name not in window}
        return cls(**(fields | {"when": when} | {name: tuple(row.get(name, ())) for name in ("but", "unless")}))

    def match(self, name: str) -> str | None:
        """Return the text that `*` of the first metric matches in `name`, or None if `name` does not match."""
        found = _pattern(next(iter(self.when))).fullmatch(name)
        return None if found is None or name in self.but else "".join(found.groups())


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("([^/]+)".join(map(re.escape, name.split("*"))))


RULES: tuple[Rule, ...] = tuple(
    Rule.from_row(row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)
MEMORY = 2 * max(one.steps + one.within for rule in RULES for one in rule.when.values())  # values kept of each metric


class RuleWatch:
    """Applies the rules to a run, step by step."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._rules = rules
        self._values: dict[str, deque[float]] = {}
        self._matching: dict[str, list[tuple[Rule, str]]] = {}  # rule and text of `*`, by metric
        self._found: dict[tuple[str, str], Finding] = {}  # by rule and metric

    def step(self, line: MetricLine) -> list[Finding]:
        """Add the metrics of a step; return the findings that occur for the first time, heaviest first."""
        step = int(line.get("step") or 0)
        new = []
        for name, value in line.items():
            self._values.setdefault(name, deque(maxlen=MEMORY)).append(math.nan if value is None else float(value))
        for name in line:
            for rule, part in self._rules_of(name):
                key = rule.name, name
                sentence = None if any(other in line for other in rule.unless) else self._sentence(rule, name, part)
                if sentence is None:
                    continue
                finding = _finding(rule, name, sentence, step)
                if before := self._found.get(key):
                    finding = replace(finding, first_step=before.first_step, steps=before.steps + 1)
                else:
                    new.append(finding)
                self._found[key] = finding
        return sorted(new, key=lambda one: -one.weight)

    def heaviest_first(self) -> tuple[Finding, ...]:
        return tuple(sorted(self._found.values(), key=lambda one: (-one.weight, one.first_step, one.metric)))

    def _rules_of(self, name: str) -> list[tuple[Rule, str]]:
        if name not in self._matching:
            matches = ((rule, rule.match(name)) for rule in self._rules)
            self._matching[name] = [(rule, part) for rule, part in matches if part is not None]
        return self._matching[name]

    def _sentence(self, rule: Rule, name: str, part: str) -> str | None:
        """Return the rule's sentence about a metric, or None if a condition does not hold."""
        (_, first), *others = rule.when.items()
        found = first.find([*self._values[name]])
        if found is None or not all(self._holds(pattern, condition) for pattern, condition in others):
            return None
        return rule.sentence.format(value=found[0], before=found[1], name=part)

    def _holds(self, pattern: str, condition: Condition) -> bool:
        names = [name for name in self._values if _pattern(pattern).fullmatch(name)]
        if not names:
            return condition.optional
        return any(condition.find([*self._values[name]]) is not None for name in names)


def _finding(rule: Rule, metric: str, sentence: str, step: int) -> Finding:
    level = Level.ERROR if rule.weight >= ERROR_WEIGHT else Level.WARNING
    evidence = (rule.meaning, f"the rule is from {rule.source}")
    found = Finding(level, sentence, evidence, f"{rule.action} ({rule.setting})")
    return replace(found, rule=rule.name, metric=metric, weight=rule.weight, first_step=step, last_step=step, steps=1)


def find_warnings(lines: Iterable[MetricLine], rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """Return the findings for the metrics of a whole run, heaviest first."""
    watch = RuleWatch(rules)
    for line in lines:
        watch.step(line)
    return watch.heaviest_first()
