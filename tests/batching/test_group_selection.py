from dataclasses import replace
from typing import Any

import pytest

from grpo_mp.algorithms.group_filters import load_group_filter
from grpo_mp.algorithms.settings import CurriculumConfig, FilterConfig
from grpo_mp.batching.group_selection import (
    GroupSelection,
    PromptCurriculum,
    groups_to_launch,
    length_bias,
    select_groups,
)
from grpo_mp.types import SampleInfo


def make_infos(*groups: tuple[float, ...], first: int = 10) -> list[SampleInfo]:
    """Make one group for each tuple of rewards; prompts are numbered from 100."""
    return [
        SampleInfo(first + group, index, 3, 5, reward, False, 0, prompt=100 + group, is_correct=reward >= 1)
        for group, rewards in enumerate(groups)
        for index, reward in enumerate(rewards)
    ]


def rule(**values: Any) -> FilterConfig:
    return FilterConfig.model_validate(values)


def select(infos: list[SampleInfo], count: int, rule: FilterConfig) -> GroupSelection:
    return select_groups(infos, count, rule, load_group_filter(rule))


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_everything_is_kept_by_default_in_launch_order() -> None:
    selection = select(make_infos(SAME, MIXED, SAME), count=3, rule=rule())
    assert (selection.selected, selection.zero_std, selection.surplus) == ((10, 11, 12), 0, 0)


@pytest.mark.parametrize("kind", ["drop", "refill"])
def test_groups_without_difference_are_left_out_and_counted(kind: str) -> None:
    selection = select(make_infos(SAME, MIXED, SAME, MIXED), count=4, rule=rule(zero_std=kind))
    assert (selection.selected, selection.zero_std) == ((11, 13), 2)


def test_groups_are_dropped_by_accuracy_where_the_rule_says_so() -> None:
    """DAPO, eq. 11: 0 < right answers < all. Penalties for length are no difference, and hide none."""
    cut_reward = 1.0 - 1.0  # a right answer that is cut at the limit, under a penalty of the whole reward
    right = {"answer": 1.0, "overlong": -1.0}, {"answer": 0.0, "overlong": 0.0}
    wrong = {"answer": 0.0, "overlong": -0.5}, {"answer": 0.0, "overlong": 0.0}
    groups = [
        SampleInfo(group, index, 3, 5, reward, False, 0, parts, is_correct=parts["answer"] >= 1)
        for group, (rewards, parts_of_group) in enumerate([((cut_reward, 0.0), right), ((-0.5, 0.0), wrong)])
        for index, (reward, parts) in enumerate(zip(rewards, parts_of_group, strict=True))
    ]
    by_reward = select(groups, count=2, rule=rule(zero_std="drop"))
    by_accuracy = select(groups, count=2, rule=rule(zero_std="drop", metric="accuracy"))
    assert (by_reward.selected, by_accuracy.selected) == ((1,), (0,))


def test_group_without_verdicts_is_dropped_by_its_rewards() -> None:
    infos = [replace(info, is_correct=None) for info in make_infos(SAME, MIXED)]
    selection = select(infos, count=2, rule=rule(zero_std="drop", metric="accuracy"))
    assert (selection.selected, selection.zero_std) == ((11,), 1)


def test_the_first_launched_are_taken_and_the_rest_is_surplus() -> None:
    selection = select(list(reversed(make_infos(MIXED, SAME, MIXED, MIXED))), count=2, rule=rule(zero_std="refill"))
    assert (selection.selected, selection.zero_std, selection.surplus) == ((10, 12), 1, 1)


def test_next_round_launches_by_the_kept_share() -> None:
    def launch(missing: int, launched: int, taught: int, **values: Any) -> int:
        return groups_to_launch(
            missing, launched, GroupSelection(tuple(range(taught)), launched - taught, 0, 0), rule(**values)
        )

    assert launch(32, 0, 0) == 32
    assert launch(3, 0, 0, oversample_factor=1.5) == 5
    assert launch(16, 32, 16) == 32
    assert launch(8, 32, 24, oversample_factor=1.2) == 13
    assert launch(32, 32, 0) == 320


def test_the_first_to_finish_are_taken_where_the_rule_says_so() -> None:
    launched = make_infos(MIXED, MIXED, MIXED, MIXED)
    order = {10: 3, 11: 0, 12: 1, 13: 2}  # 11 was aborted
    finished = [replace(info, finish_order=order[info.group_id]) for info in launched]
    selection = select(finished, count=2, rule=rule(select_by="finish"))
    assert (selection.selected, selection.surplus, selection.unfinished) == ((12, 13), 1, 1)
    assert select(finished, count=2, rule=rule()).selected == (10, 12)


def test_length_bias_of_selected_groups() -> None:
    short, long = make_infos(MIXED), [replace(info, response_tokens=20) for info in make_infos(MIXED, first=11)]
    assert length_bias([*short, *long], {10}) == 5 / 12.5
    assert length_bias([*short, *long], {10, 11}) == 1.0
    assert length_bias(short, ()) == 1.0


def test_prompt_is_skipped_after_a_solved_streak_and_starts_at_zero() -> None:
    skip_rule = CurriculumConfig(solved_streak=2, skip_steps=3)
    state = PromptCurriculum({}, {})
    state = state.updated(make_infos(SAME, MIXED), 1, skip_rule)
    assert (state.solved_streak, state.skipped_until) == ({100: 1}, {})
    state = state.updated(make_infos(SAME, SAME), 2, skip_rule)
    assert (state.solved_streak, state.skipped_until) == ({101: 1}, {100: 5})
    assert [state.is_skipped(100, step) for step in (3, 4, 5, 6)] == [True, True, True, False]
    assert not state.is_skipped(101, 3)
    state = state.updated(make_infos(MIXED, MIXED), 5, skip_rule)
    assert (state.solved_streak, state.skipped_until) == ({}, {})


@pytest.mark.parametrize("right", [False, None])
def test_prompt_without_right_answers_is_never_skipped(right: bool | None) -> None:
    """Whatever its reward: a boxed wrong answer may well have one above 0."""
    not_right = [replace(info, is_correct=right) for info in make_infos(SAME)]
    assert PromptCurriculum({}, {}).updated(not_right, 1, CurriculumConfig(solved_streak=1)) == PromptCurriculum({}, {})


def test_without_the_rule_the_curriculum_stays_empty() -> None:
    assert PromptCurriculum({}, {}).updated(make_infos(SAME), 1, CurriculumConfig()) == PromptCurriculum({}, {})
