from dataclasses import replace

from grpo_mp.algorithms.selection import load_group_filter
from grpo_mp.algorithms.settings import FilterConfig
from grpo_mp.utils.types import SampleInfo

BY_REWARD = load_group_filter(FilterConfig())
BY_ACCURACY = load_group_filter(FilterConfig(metric="accuracy"))


def group_of(*rewards: float) -> list[SampleInfo]:
    return [
        SampleInfo(1, index, 3, 5, reward, False, 0, is_correct=reward >= 1) for index, reward in enumerate(rewards)
    ]


def test_groups_without_difference_are_dropped() -> None:
    assert [BY_REWARD(group_of(*rewards)) for rewards in ((1.0, 1.0), (0.0, 1.0), (0.5, 0.5))] == [False, True, False]


def test_groups_are_dropped_by_accuracy_where_the_rule_says_so() -> None:
    """DAPO, eq. 11: 0 < right answers < all. Penalties for length are no difference, and hide none."""
    cut_reward = 1.0 - 1.0  # a right answer that is cut at the limit, under a penalty of the whole reward
    right = {"answer": 1.0, "overlong": -1.0}, {"answer": 0.0, "overlong": 0.0}
    wrong = {"answer": 0.0, "overlong": -0.5}, {"answer": 0.0, "overlong": 0.0}
    groups = [
        [
            SampleInfo(group, index, 3, 5, reward, False, 0, parts, is_correct=parts["answer"] >= 1)
            for index, (reward, parts) in enumerate(zip(rewards, parts_of_group, strict=True))
        ]
        for group, (rewards, parts_of_group) in enumerate([((cut_reward, 0.0), right), ((-0.5, 0.0), wrong)])
    ]
    assert [BY_REWARD(group) for group in groups] == [False, True]
    assert [BY_ACCURACY(group) for group in groups] == [True, False]


def test_a_sample_of_unknown_correctness_is_no_difference() -> None:
    for right in (True, False):
        group = [replace(info, is_correct=right, reward=float(right)) for info in group_of(*[1.0] * 7)]
        assert not BY_ACCURACY([*group, replace(group[0], is_correct=None, reward=0.5)])
    assert BY_ACCURACY([*group_of(1.0, 0.0), replace(group_of(1.0)[0], is_correct=None)])
