"""Warnings of a run, found in its metrics by one table of rules (rules.yaml). Pure."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mp.monitor.conditions import Condition, Evidence
from grpo_mp.monitor.history import History

MetricLine = Mapping[str, float | None]  # as in metrics.jsonl: `step` and metrics by name; None: not finite


@dataclass(frozen=True)
class Rule:
    """A row of the table. `when`: conditions by metric, `*` in a name stands for any part of one; all must hold.

    The first is the evidence: each metric that it matches is a finding of its own, but those that `but` names. Others
    compare with what was at the same time, where they say so. `sentence` may hold {value} and {before} of the evidence,
    and {name}, what `*` stands for. `weight`, 1 to 100, says how much of the run is at stake; `source` where the
    sickness and its limit are described. A step with a metric of `unless` is none of this kind.
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


@cache
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
        self._values: dict[str, History] = defaultdict(lambda: History(memory))
        self._matching: dict[str, list[tuple[Rule, str]]] = {}  # rules by the name of their first metric
        self._holding: set[tuple[str, str]] = set()

    def step(self, line: MetricLine) -> list[Finding]:
        """Add the line of a step; return what holds now and did not at the step before, by weight."""
        step, new = int(line.get("step") or 0), []
        for name, value in line.items():
            self._values[name].add(step, math.nan if value is None else float(value))
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

    def heaviest_first(self) -> tuple[Finding, ...]:
        """Return all that was found so far."""
        return tuple(sorted(self.found.values(), key=lambda one: (-one.weight, one.first_step, one.metric)))

    def _rules_of(self, name: str) -> list[tuple[Rule, str]]:
        if name not in self._matching:
            found = ((rule, rule.matches(name)) for rule in self.rules)
            self._matching[name] = [(rule, part) for rule, part in found if part is not None]
        return self._matching[name]

    def _find(self, rule: Rule, name: str, part: str, step: int) -> Finding | None:
        (_, first), *others = rule.when.items()
        evidence = self._evidence(name, part, first)
        if evidence is None or not all(any(self._evidences(*other, evidence.since)) for other in others):
            return None
        sentence = rule.sentence.format(value=evidence.value, before=evidence.before, name=part)
        texts = (sentence, rule.meaning, rule.action, rule.setting, rule.source)
        return Finding(rule.name, rule.weight, name, *texts, first_step=step, last_step=step)

    def _evidences(self, pattern: str, condition: Condition, since: int | None) -> Iterator[bool]:
        """Yield for each metric of this name whether the condition holds for it."""
        if condition.optional and pattern not in self._values:
            yield True
        for name in [pattern] if "*" not in pattern else [*self._values]:
            if name in self._values and (match := _pattern(pattern).fullmatch(name)):
                yield self._evidence(name, "".join(match.groups()), condition, since) is not None

    def _evidence(self, name: str, part: str, condition: Condition, since: int | None = None) -> Evidence | None:
        """Return what the condition finds in a metric; `part` is what `*` stands for in its name."""
        errors = self._values.get(condition.error.replace("*", part)) if condition.error else None
        return condition.find(self._values[name], since, errors)


class WarningsOfGrowingRun:
    """Finds the warnings of a run that goes on: each line of its metrics is looked at once."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        """Take the rules; no line has been seen."""
        self._rules, self._seen, self._watch = rules, list[MetricLine](), RuleWatch(rules)

    def find(self, lines: Sequence[MetricLine]) -> tuple[Finding, ...]:
        """Return what `find_warnings` does for the lines so far, all of them each time.

        Where those seen before are not the first of them, as of a run that resumed, all are looked at anew.
        """
        if [*lines[: len(self._seen)]] != self._seen:  # quick: most are the same objects
            self._seen, self._watch = [], RuleWatch(self._rules)
        for line in lines[len(self._seen) :]:
            self._watch.step(line)
            self._seen.append(line)
        return self._watch.heaviest_first()


def find_warnings(lines: Iterable[MetricLine], rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """Return what the rules find in a run's metrics, the lines of metrics.jsonl in order of steps; heaviest first."""
    watch = RuleWatch(rules)
    for line in lines:
        watch.step(line)
    return watch.heaviest_first()
