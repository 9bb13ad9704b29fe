"""What must hold of a metric for a rule to find something: limits, changes, creeping. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_mp.monitor.history import History, Past, creeps, mean, noise_of

FEWEST_BLOCKS = 12  # in which a run may creep: three thirds of four


@dataclass(frozen=True)
class Evidence:
    """A metric's mean now, and before, at step `since`, where the condition is about a change."""

    value: float
    before: float
    since: int | None = None


@dataclass(frozen=True)
class Condition:
    """What must hold of a metric's last values. All that is given must.

    `above`, `below`: each of the last `steps` values is. What is not finite is above every limit. In all else only
    finite values count: the last `steps` of them, which must be among the last 2 `steps` values.

    The others compare the mean of these values with what was before: with the means of as many at most `within` values
    before, and unless `whole_run` is false with the medians of all blocks of the run, so that a change is seen however
    slow it is. `rises_to` and `falls_to`: times the least or the largest of them; `rises_by` and `falls_by`: by so
    much. `errors`: the change is more than so many standard errors, too: of `error`, the metric that has the standard
    error of a value, or of the mean by the metric's own noise. `same_time`: what was before is what was when the rule's
    first condition had its value before. `negated`: the change is not there, since that time, or the start of the run.
    `every`: each of the last values is changed so, not only their mean. `optional`: a run that has no such metric is
    not asked.

    `creeps`: it rises by this share over the last `within` values, or the whole, half or quarter of the run's blocks,
    and by half an even part of that in each third of them.
    """

    above: float | None = None
    below: float | None = None
    rises_to: float | None = None
    falls_to: float | None = None
    rises_by: float | None = None
    falls_by: float | None = None
    creeps: float | None = None
    errors: float = 0.0
    error: str = ""
    same_time: bool = False
    negated: bool = False
    every: bool = False
    whole_run: bool = True
    optional: bool = False
    steps: int = 5
    within: int = 40

    @property
    def changes(self) -> Mapping[str, float]:
        """Return the changes that are asked for, by name."""
        names = ("rises_to", "falls_to", "rises_by", "falls_by")
        return {name: value for name in names if (value := vars(self)[name]) is not None}

    @property
    def looks_back(self) -> bool:
        """Return whether it compares with what was before."""
        return bool(self.changes) or self.creeps is not None

    @property
    def memory(self) -> int:
        """Return how many values it looks back on one by one."""
        return max(2 * self.steps, 1 + self.steps + self.within if self.looks_back else 0)

    def find(self, values: History, since: int | None = None, errors: History | None = None) -> Evidence | None:
        """Return what was seen where the condition holds for the last values; else None.

        `since`: the step at which what was before is looked up for `same_time`; `errors`: the history of `error`.
        """
        last = values.last(self.steps)
        if len(last) < self.steps:
            return None
        if self.above is not None and not all(value > self.above for value in last if math.isfinite(value)):
            return None
        if self.below is None and not self.looks_back:
            numbers = list(filter(math.isfinite, last)) or last
            return Evidence(mean(numbers), mean(numbers))
        finite = list(filter(math.isfinite, values.last(2 * self.steps)))[-self.steps :]
        if len(finite) < self.steps or (self.below is not None and max(finite) >= self.below):
            return None
        if self.creeps is not None:
            return self._find_creeping(values, self.creeps)
        now = mean(finite)
        if not self.looks_back:
            return Evidence(now, now)
        found = self._find_change(values, now, since, errors)
        return found if found and (not self.every or self._all_changed(finite, found.before)) else None

    def _all_changed(self, values: Sequence[float], before: float) -> bool:
        return all(CHANGES[name](value, before, limit) for name, limit in self.changes.items() for value in values)

    def _find_creeping(self, values: History, share: float) -> Evidence | None:
        spans = [values.last_finite(self.within + 1)]
        if len(spans[0]) <= self.within:
            return None
        if self.whole_run:
            blocks = [block.value for block in values.blocks]
            lengths = (len(blocks) // part for part in (1, 2, 4))
            spans += [blocks[-length:] for length in lengths if length >= FEWEST_BLOCKS]
        return next((Evidence(span[-1], span[0]) for span in spans if creeps(span, share)), None)

    def _find_change(self, values: History, now: float, since: int | None, errors: History | None) -> Evidence | None:
        past = values.before(self.steps, self.within, self.whole_run)
        if not past.values:
            return None
        found = []
        for name, limit in self.changes.items():
            place = self._place(name, past, since)
            base = Evidence(now, past.values[place], past.steps[place])
            has_changed = CHANGES[name](now, base.before, limit)
            has_changed = has_changed and abs(now - base.before) > self.errors * self._error(values, base, errors)
            if has_changed == self.negated:
                return None
            found.append(base)
        return found[0]

    def _place(self, change: str, past: Past, since: int | None) -> int:
        """Return with which stretch the values now are compared."""
        if self.same_time and since is not None:
            return past.place_of(since)
        if self.negated:
            return 0
        pick = min if change.startswith("rises") else max
        return past.values.index(pick(past.values))

    def _error(self, values: History, base: Evidence, errors: History | None) -> float:
        """Return the standard error of the change from `base`; 0 where it is not known, or no matter."""
        if not self.errors:
            return 0.0
        if self.error:
            now = errors.last_finite(1) if errors else []
            then = errors.nearest(base.since, self.within) if errors and base.since is not None else None
            return math.hypot(now[0], then) if now and then is not None else 0.0
        return noise_of(values.last_finite(self.steps + self.within)) * math.sqrt(2 / self.steps)


CHANGES: Mapping[str, Callable[[float, float, float], bool]] = {
    "rises_to": lambda now, before, share: now > share * before,
    "falls_to": lambda now, before, share: now < share * before,
    "rises_by": lambda now, before, change: now > before + change,
    "falls_by": lambda now, before, change: now < before - change,
}
