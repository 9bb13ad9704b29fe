"""The estimators against every draw written out, and the errors against draws of whole evaluations."""

from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.monitor.evaluation import majority, mean_over_problems, pass_at_k

RIGHT = "right"
NONE = None
ANSWERS = st.lists(st.sampled_from([RIGHT, "a", "b", "c", NONE]), min_size=1, max_size=9)


def vote(drawn: tuple[str | None, ...]) -> Fraction:
    """Return the chance that the vote of these answers is right; tied answers share it."""
    counts = Counter(answer for answer in drawn if answer is not NONE)
    leading = [answer for answer, count in counts.items() if count == max(counts.values())]
    return Fraction(int(RIGHT in leading), max(1, len(leading)))


@given(ANSWERS, st.data())
def test_pass_at_k_is_the_mean_over_every_draw(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    draws = list(combinations(answers, k))
    counts = Counter(answers)
    right = counts.pop(RIGHT, 0)
    _ = counts.pop(NONE, 0)
    expected_pass = Fraction(sum(RIGHT in drawn for drawn in draws), len(draws))
    assert pass_at_k(len(answers), right, k) == pytest.approx(float(expected_pass), abs=1e-12)
    assert majority(right, counts.values()) == pytest.approx(float(vote(tuple(answers))), abs=1e-12)


def test_pass_at_k_is_the_paper_s_product() -> None:
    """Its figure 3 computes 1 - prod(1 - k / i) for i = n - c + 1 .. n."""
    for n, c, k in ((200, 3, 100), (64, 1, 64), (1024, 5, 512), (10, 0, 10), (10, 9, 2)):
        expected = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-9)


def test_the_error_is_the_spread_of_evaluations_over_other_problems() -> None:
    """Eight samples of a problem are like each other; counting them as independent would say half of the error."""
    generator = np.random.default_rng(1)

    def means() -> np.ndarray:
        return generator.binomial(8, generator.beta(0.5, 0.5, size=100)) / 8

    errors = [mean_over_problems(means().tolist()).error for _ in range(400)]
    spread = np.std([means().mean() for _ in range(4000)])
    assert np.mean(errors) == pytest.approx(spread, rel=0.05)
    assert mean_over_problems([0.25]).error is None
