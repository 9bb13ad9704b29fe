"""Failures and logged values of the rewards: counted on each rank, added up over the job."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts since `Scorer.take_tally` was last called."""

    failures: Counter[str] = field(default_factory=Counter)  # failed calls by part; one call scores one group
    complaints: dict[str, str] = field(default_factory=dict)  # by part: its first failure, in one sentence
    unscored: int = 0  # samples to which no part applied
    given_up: int = 0  # answers that math-verify could not compare in time; they count as wrong
    sums: dict[str, float] = field(default_factory=dict)  # of what functions gave to log_metric, by its name
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def logged(self) -> dict[str, float]:
        """Return the means of the values given to `log_metric`."""
        return {name: self.sums[name] / count for name, count in sorted(self.counts.items())}

    def log(self, name: str, value: float) -> None:
        """Add one value given to `log_metric`."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the tally as it is written to JSON."""
        return {
            "failures": dict(self.failures),
            "complaints": self.complaints,
            "unscored": self.unscored,
            "answers_given_up": self.given_up,
            "logged": self.logged,
        }


def total(tallies: Iterable[Tally]) -> Tally:
    """Add up tallies; of several complaints about one part the first is kept."""
    merged = Tally()
    for tally in tallies:
        merged.failures.update(tally.failures)
        merged.complaints = tally.complaints | merged.complaints
        merged.unscored += tally.unscored
        merged.given_up += tally.given_up
        merged.sums |= {name: merged.sums.get(name, 0.0) + value for name, value in tally.sums.items()}
        merged.counts.update(tally.counts)
    return merged
