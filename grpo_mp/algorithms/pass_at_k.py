"""Estimators over n samples of a problem, for k of them: pass@k, maj@k, and means with their errors. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

MAX_SAMPLES = 1024  # of one problem: with more, binomial coefficients pass what a float64 holds


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its standard error; None where one problem gives none."""

    value: float
    error: float | None = None


def mean_over_problems(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per problem, at least one, and its standard error.

    Samples of one problem are not independent draws, problems are (Miller 2024, arXiv 2411.00640, sections 2 and 3.1).
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


def k_values(samples: int) -> tuple[int, ...]:
    """Return the k of pass@k and maj@k: powers of two up to the number of samples, and that number."""
    return tuple(sorted({*(2**power for power in range(samples.bit_length())), samples}))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate the chance that one of k samples is right: 1 - C(n - c, k) / C(n, k), unbiased.

    Chen et al. 2021, arXiv 2107.03374, eq. 1, with n = samples and c = right.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def maj_at_k(right: int, wrong: Iterable[int], abstaining: int, ks: Sequence[int]) -> list[float]:
    """Estimate for each k the chance that the most frequent answer of k samples is right.

    `right` samples gave the right answer, each of `wrong` counts those that gave one wrong answer, `abstaining` samples
    gave none. Of t answers that lead together each wins with chance 1 / t. Exact: the mean over all C(n, k) draws
    without replacement, so it is unbiased.
    """
    wrong_counts = list(wrong)
    samples = right + sum(wrong_counts) + abstaining
    won = dict.fromkeys(ks, 0.0)
    for votes in range(1, min(right, max(ks)) + 1):
        ways = _draws_won_by(wrong_counts, abstaining, votes, max(ks) - votes)
        for k in ks:
            won[k] += math.comb(right, votes) * ways[k - votes] if k >= votes else 0.0
    return [float(won[k]) / math.comb(samples, k) for k in ks]


def _draws_won_by(wrong: Sequence[int], abstaining: int, votes: int, max_draws: int) -> np.ndarray:
    """Count the draws of x other samples in which no answer has more than `votes`: [max_draws + 1], by x.

    A draw in which t answers tie with the right one counts 1 / (t + 1). Row t of `ways` counts draws with t ties,
    column x those of x samples. An answer of c samples gives C(c, x) ways to draw x of them. Answers too rare to tie
    count as no answer.
    """
    tied_or_above = [count for count in wrong if count >= votes]
    below = abstaining + sum(wrong) - sum(tied_or_above)
    ways = _binomials(below, max_draws + 1)[None]
    for count in tied_or_above:
        fewer_votes = _binomials(count, min(votes, max_draws + 1))
        extended = np.zeros((len(ways) + 1, max_draws + 1))
        for ties, row in enumerate(ways):
            extended[ties] += np.convolve(row, fewer_votes)[: max_draws + 1]
            extended[ties + 1, votes:] += math.comb(count, votes) * row[: max(0, max_draws + 1 - votes)]
        ways = extended[: max_draws // votes + 1]
    return (1.0 / np.arange(1, len(ways) + 1)) @ ways


def _binomials(count: int, columns: int) -> np.ndarray:
    """Return C(count, x) for x = 0 .. columns - 1."""
    return np.array([float(math.comb(count, x)) for x in range(columns)])
