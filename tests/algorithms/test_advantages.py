"""Advantages against the formula of TRL's trainer, written out group by group in float64."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.algorithms.advantages import group_advantages, groups_without_difference

EPS = 1e-4
REWARDS = st.lists(
    st.tuples(st.integers(0, 5), st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.floats(-1e3, 1e3))), max_size=40
)


def written_out(rewards: Sequence[float], group_ids: Sequence[int], normalise_std: bool) -> list[float]:
    """(r - mean) / (std + eps), std over n - 1; zero where no reward of the group differs."""
    advantages = []
    for reward, group_id in zip(rewards, group_ids, strict=True):
        group = [other for other, other_id in zip(rewards, group_ids, strict=True) if other_id == group_id]
        if min(group) == max(group):
            advantages.append(0.0)
            continue
        scale = np.std(group, ddof=1) + EPS if normalise_std else 1.0
        advantages.append(float((reward - math.fsum(group) / len(group)) / scale))
    return advantages


@given(REWARDS, st.booleans())
def test_any_rewards_in_any_groups(drawn: list[tuple[int, float]], normalise_std: bool) -> None:
    group_ids, rewards = [group for group, _ in drawn], [reward for _, reward in drawn]
    found = group_advantages(rewards, group_ids, normalise_std, EPS)
    expected = written_out(rewards, group_ids, normalise_std)
    # Where rewards differ only in their last digits, so does the mean: its rounding is the limit.
    scale = max(map(abs, rewards), default=0.0) / (EPS if normalise_std else 1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14 * scale)


@given(REWARDS, st.randoms(use_true_random=False))
def test_order_means_nothing(drawn: list[tuple[int, float]], shuffle: random.Random) -> None:
    order = list(range(len(drawn)))
    shuffle.shuffle(order)
    straight = group_advantages([reward for _, reward in drawn], [group for group, _ in drawn], True, EPS)
    mixed = group_advantages([drawn[i][1] for i in order], [drawn[i][0] for i in order], True, EPS)
    # Sums in another order round otherwise.
    scale = max((abs(reward) for _, reward in drawn), default=0.0) / EPS
    np.testing.assert_allclose([straight[i] for i in order], mixed, rtol=1e-9, atol=1e-14 * scale)


def test_one_group_by_hand() -> None:
    assert group_advantages([0.0, 1.0, 2.0], [7, 7, 7], True, 0.0) == (-1.0, 0.0, 1.0)
    assert group_advantages([0.0, 1.0, 5.0], [7, 7, 7], False, EPS) == (-2.0, -1.0, 3.0)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1, -0.7])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_group_without_difference_is_exactly_zero(reward: float, size: int) -> None:
    found = group_advantages([reward] * size + [0.0, 1.0], [4] * size + [2, 2], True, EPS)
    assert found[:size] == (0.0,) * size
    assert found[size] == -found[size + 1] < 0


def test_share_of_groups_without_difference() -> None:
    assert groups_without_difference([1.0, 1.0, 0.0, 0.5, 0.3], [9, 9, 1, 1, 5]) == pytest.approx(2 / 3)
    assert groups_without_difference([0.0, 1.0], [3, 3]) == 0.0
    assert groups_without_difference([0.1] * 6, [0, 1, 0, 1, 0, 1]) == 1.0


def test_nothing_gives_nothing_and_unequal_lists_are_refused() -> None:
    assert group_advantages([], [], True, EPS) == ()
    with pytest.raises(ValueError, match="2 rewards but 1 group ids"):
        group_advantages([1.0, 2.0], [0], True, EPS)
