from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.algorithms.aggregation import Aggregation, token_weights

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=50)


@given(LENGTHS, st.sampled_from(["sequence_mean", "token_mean"]))
def test_weights_of_all_tokens_sum_to_one(lengths: list[int], aggregation: Aggregation) -> None:
    weights = token_weights(lengths, aggregation)
    assert sum(n * w for n, w in zip(lengths, weights, strict=True)) == pytest.approx(1.0, rel=1e-12)


@given(LENGTHS)
def test_each_weight_is_the_formula_s(lengths: list[int]) -> None:
    by_sequence = [float(Fraction(1, len(lengths)) * Fraction(1, n)) for n in lengths]
    by_token = [float(Fraction(1, sum(lengths)))] * len(lengths)
    assert token_weights(lengths, "sequence_mean") == pytest.approx(by_sequence, rel=1e-12)
    assert token_weights(lengths, "token_mean") == pytest.approx(by_token, rel=1e-12)
