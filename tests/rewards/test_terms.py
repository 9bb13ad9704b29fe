from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.terms import BuiltInTerms, overlong_penalty, repetition_penalty
from grpo_mp.types import SampleGroup


def test_length_is_the_used_share_of_the_limit(make_group: Callable[..., SampleGroup]) -> None:
    built_in = BuiltInTerms(RewardConfig(length=1.0), max_response_tokens=8, used=["length"])
    assert built_in.values["length"](make_group(["x" * tokens for tokens in (2, 8, 9)])) == [0.25, 1.0, 1.0]


@given(st.integers(0, 300), st.integers(2, 200), st.data())
def test_overlong_is_equation_13_of_dapo(length: int, l_max: int, data: st.DataObject) -> None:
    l_cache = data.draw(st.integers(1, l_max - 1))
    if length <= l_max - l_cache:
        expected = 0.0
    elif length <= l_max:
        expected = ((l_max - l_cache) - length) / l_cache
    else:
        expected = -1.0
    assert overlong_penalty(length, l_max, l_cache) == expected


def test_overlong_at_its_corners() -> None:
    assert [overlong_penalty(tokens, 20, 10) for tokens in (1, 10, 11, 15, 20, 21)] == [0, 0, -0.1, -0.5, -1, -1]


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
    assert repetition_penalty(tokens, ngram) == pytest.approx(value)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_counts_what_stood_before(tokens: list[int], ngram: int) -> None:
    grams = [tokens[i : i + ngram] for i in range(max(0, len(tokens) - ngram + 1))]
    num_repeated = sum(grams[i] in grams[:i] for i in range(len(grams)))
    # A quotient and a difference, each at most 1 and rounded by 2^-53 of itself.
    exact = Fraction(-num_repeated, len(grams)) if grams else Fraction(0)
    assert abs(Fraction(repetition_penalty(tokens, ngram)) - exact) <= Fraction(2, 2**53)


@pytest.mark.parametrize("tokens", [15, 20, 24, 30, 31])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({"answer": 1.0}, 0.0, 1.0),
        ({"answer": 3.0}, 0.0, 3.0),
        ({"answer": 2.0, "range": [-1.0, 1.0]}, 0.0, 2.0),
    ],
)
def test_overlong_weighs_as_in_dapo_whatever_the_range_of_the_reward(
    tokens: int, right: bool, settings: dict[str, Any], low: float, high: float, make_group: Callable[..., SampleGroup]
) -> None:
    """DAPO scores -1 and 1 and takes eq. 13 off; on another range the whole is that, moved and stretched to it."""
    published = (1.0 if right else -1.0) + min(0.0, max(-1.0, (20 - tokens) / 10))
    overlong = {"overlong": {"weight": 1.0, "buffer_tokens": 10}}
    scorer = Scorer(RewardConfig.model_validate({"answer": 1.0} | settings | overlong), max_response_tokens=30)
    try:
        (sample,) = scorer.score_group(make_group([("\\boxed{7}" if right else "none").ljust(tokens)])).samples
    finally:
        scorer.close()
    assert sample.reward == pytest.approx(low + (published + 1) / 2 * (high - low))


def test_overlong_without_a_range_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"which is 0 here: set reward\.range"):
        RewardConfig.model_validate({"length": 1.0, "overlong": {"weight": 1.0}})


def test_a_range_ascends() -> None:
    with pytest.raises(ValidationError, match="write the lowest reward, then the highest"):
        RewardConfig.model_validate({"answer": 1.0, "range": [1.0, 1.0]})
