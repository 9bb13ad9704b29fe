from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.rewards.length import length_part, overlong_part, repetition_part


def test_length_part() -> None:
    assert [length_part(tokens, 8) for tokens in (2, 8, 9)] == [0.25, 1.0, 1.0]


@given(st.integers(0, 300), st.integers(2, 200), st.data())
def test_overlong_is_equation_13_of_dapo(length: int, l_max: int, data: st.DataObject) -> None:
    l_cache = data.draw(st.integers(1, l_max - 1))
    if length <= l_max - l_cache:
        expected = 0.0
    elif length <= l_max:
        expected = ((l_max - l_cache) - length) / l_cache
    else:
        expected = -1.0
    assert overlong_part(length, l_max, l_cache) == expected


def test_overlong_at_its_corners() -> None:
    assert [overlong_part(tokens, 20, 10) for tokens in (1, 10, 11, 15, 20, 21)] == [0, 0, -0.1, -0.5, -1, -1]


@pytest.mark.parametrize(
    ("tokens", "ngram", "value"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 2, 1, 2], 2, -1 / 3),
        ([7] * 11, 2, -0.9),
        ([7] * 4, 4, 0.0),
        ([7] * 3, 4, 0.0),
        ([], 1, 0.0),
        ([5, 5, 6], 1, -1 / 3),
    ],
)
def test_repetition(tokens: list[int], ngram: int, value: float) -> None:
    assert repetition_part(tokens, ngram) == pytest.approx(value)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_counts_what_stood_before(tokens: list[int], ngram: int) -> None:
    grams = [tokens[i : i + ngram] for i in range(max(0, len(tokens) - ngram + 1))]
    repeated = sum(grams[i] in grams[:i] for i in range(len(grams)))
    # A quotient and a difference, each at most 1 and rounded by 2^-53 of itself.
    exact = Fraction(-repeated, len(grams)) if grams else Fraction(0)
    assert abs(Fraction(repetition_part(tokens, ngram)) - exact) <= Fraction(2, 2**53)
