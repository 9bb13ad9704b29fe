"""Estimators over n samples of a problem, for k of them: pass@k, maj@k, and means with their errors. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

MOST_SAMPLES = 1024  # of one problem: with more, binomial coefficients pass what a float64 holds


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its standard error; None where one problem gives none."""

    value: float
    error: float | None = None


def over_problems(values: Sequence[float]) -> Estimate:
    """The mean of one value for each problem, and its standard error: the samples of one problem are no independent
    draws, problems are (Miller 2024, arXiv 2411.00640, sections 2 and 3.1). Needs at least one value.
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


def sizes(samples: int) -> tuple[int, ...]:
    """The k of pass@k and maj@k: powers of two up to the number of samples, and that number."""
    return tuple(sorted({*(2**power for power in range(samples.bit_length())), samples}))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that of k samples, drawn of n without putting back, one is right: 1 - C(n - c, k) / C(n, k), unbiased
    (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def maj_at_k(right: int, wrong: Iterable[int], abstaining: int, ks: Sequence[int]) -> list[float]:
    """For each k: chance that the most frequent answer of k samples, drawn of n without putting back, is right.

    `right` samples gave the right answer, each of `wrong` counts those that gave one wrong answer, `abstaining` samples
    gave none. Answers that lead together share the vote: of t of them, each is taken with chance 1 / t. Exact: the mean
    over all C(n, k) draws, so it is unbiased.
    """
    others = list(wrong)
    samples = right + sum(others) + abstaining
    won = dict.fromkeys(ks, 0.0)
    for votes in range(1, min(right, max(ks)) + 1):
        ways = _draws_behind(others, abstaining, votes, max(ks) - votes)
        for k in ks:
            won[k] += math.comb(right, votes) * ways[k - votes] if k >= votes else 0.0
    return [float(won[k]) / math.comb(samples, k) for k in ks]


def _draws_behind(wrong: Sequence[int], abstaining: int, votes: int, most: int) -> np.ndarray:
    """[most + 1]: in how many ways x samples of the others leave no answer before `votes`; one in which t answers are
    level with it counts 1 / (t + 1).

    Row t of `ways` counts draws with t answers level, column x those of x samples. An answer of c samples gives
    C(c, x) ways to draw x of them. One that cannot come level is as good as no answer.
    """
    rivals = [count for count in wrong if count >= votes]
    free = abstaining + sum(wrong) - sum(rivals)
    ways = _choices(free, most + 1)[None]
    for count in rivals:
        behind = _choices(count, min(votes, most + 1))
        grown = np.zeros((len(ways) + 1, most + 1))
        for level, row in enumerate(ways):
            grown[level] += np.convolve(row, behind)[: most + 1]
            grown[level + 1, votes:] += math.comb(count, votes) * row[: max(0, most + 1 - votes)]
        ways = grown[: most // votes + 1]
    return (1.0 / np.arange(1, len(ways) + 1)) @ ways


def _choices(count: int, columns: int) -> np.ndarray:
    """C(count, x) for x = 0 .. columns - 1."""
    return np.array([float(math.comb(count, x)) for x in range(columns)])
