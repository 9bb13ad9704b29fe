"""What the rewards met while they scored: counted on each rank, added up over the job."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts since the last look."""

    failures: Counter[str] = field(default_factory=Counter)  # failed calls by part; one call scores one group
    complaints: dict[str, str] = field(default_factory=dict)  # by part: its first failure, in one sentence
    unscored: int = 0  # samples to which no part applied
    given_up: int = 0  # answers that math-verify could not compare in time; they count as wrong
    sums: dict[str, float] = field(default_factory=dict)  # of what functions gave to log_metric, by its name
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def logged(self) -> dict[str, float]:
        """Means of what functions gave to `log_metric`."""
        return {name: self.sums[name] / count for name, count in sorted(self.counts.items())}

    def log(self, name: str, value: float) -> None:
        """One value given to `log_metric`."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] += 1


def as_tree(tally: Tally) -> dict[str, Any]:
    """A tally as JSON holds it."""
    return {
        "failures": dict(tally.failures),
        "complaints": tally.complaints,
        "unscored": tally.unscored,
        "answers_given_up": tally.given_up,
        "logged": tally.logged,
    }


def total(tallies: Iterable[Tally]) -> Tally:
    """One tally of many; of complaints about the same part the first."""
    whole = Tally()
    for one in tallies:
        whole.failures.update(one.failures)
        whole.complaints = one.complaints | whole.complaints
        whole.unscored += one.unscored
        whole.given_up += one.given_up
        whole.sums |= {name: whole.sums.get(name, 0.0) + value for name, value in one.sums.items()}
        whole.counts.update(one.counts)
    return whole
