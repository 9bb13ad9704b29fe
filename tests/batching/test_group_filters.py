from dataclasses import replace
from typing import Any

import pytest

from grpo_mp.algorithms.settings import Filter
from grpo_mp.batching.group_filters import GroupSelection, PromptCurriculum, admit, length_bias, to_launch
from grpo_mp.types import SampleInfo


def infos(*groups: tuple[float, ...], first: int = 10) -> list[SampleInfo]:
    """One group for each tuple of rewards; prompts are numbered from 100."""
    return [
        SampleInfo(first + group, index, 0, 3, 5, reward, False, 0, prompt=100 + group, right=reward >= 1)
        for group, rewards in enumerate(groups)
        for index, reward in enumerate(rewards)
    ]


def rule(**values: Any) -> Filter:
    return Filter.model_validate(values)


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_everything_is_kept_by_default_in_launch_order() -> None:
    found = admit(infos(SAME, MIXED, SAME), wanted=3, rule=rule())
    assert (found.admitted, found.no_difference, found.surplus) == ((10, 11, 12), 0, 0)


@pytest.mark.parametrize("kind", ["drop", "refill"])
def test_groups_without_difference_are_left_out_and_counted(kind: str) -> None:
    found = admit(infos(SAME, MIXED, SAME, MIXED), wanted=4, rule=rule(no_difference=kind))
    assert (found.admitted, found.no_difference, found.missing(4)) == ((11, 13), 2, 2)


def test_groups_are_dropped_by_accuracy_where_the_rule_says_so() -> None:
    """DAPO, eq. 11: 0 < right answers < all. Penalties for length are no difference, and hide none."""
    limit = 1.0 - 1.0  # a right answer that is cut at the limit, under a penalty of the whole reward
    right = {"answer": 1.0, "overlong": -1.0}, {"answer": 0.0, "overlong": 0.0}
    wrong = {"answer": 0.0, "overlong": -0.5}, {"answer": 0.0, "overlong": 0.0}
    groups = [
        SampleInfo(group, index, 0, 3, 5, reward, False, 0, parts, right=parts["answer"] >= 1)
        for group, (rewards, both) in enumerate([((limit, 0.0), right), ((-0.5, 0.0), wrong)])
        for index, (reward, parts) in enumerate(zip(rewards, both, strict=True))
    ]
    by_reward = admit(groups, wanted=2, rule=rule(no_difference="drop"))
    by_accuracy = admit(groups, wanted=2, rule=rule(no_difference="drop", metric="accuracy"))
    assert (by_reward.admitted, by_accuracy.admitted) == ((1,), (0,))


def test_a_group_that_nothing_judges_is_dropped_by_its_rewards() -> None:
    unjudged = [replace(info, right=None) for info in infos(SAME, MIXED)]
    found = admit(unjudged, wanted=2, rule=rule(no_difference="drop", metric="accuracy"))
    assert (found.admitted, found.no_difference) == ((11,), 1)


def test_the_first_launched_are_taken_and_the_rest_is_surplus() -> None:
    found = admit(list(reversed(infos(MIXED, SAME, MIXED, MIXED))), wanted=2, rule=rule(no_difference="refill"))
    assert (found.admitted, found.no_difference, found.surplus) == ((10, 12), 1, 1)


def test_the_next_round_launches_as_many_as_the_share_that_teaches_demands() -> None:
    def launch(missing: int, launched: int, taught: int, **values: Any) -> int:
        return to_launch(
            missing, launched, GroupSelection(tuple(range(taught)), launched - taught, 0, 0), rule(**values)
        )

    assert launch(32, 0, 0) == 32
    assert launch(3, 0, 0, oversample=1.5) == 5
    assert launch(16, 32, 16) == 32
    assert launch(8, 32, 24, oversample=1.2) == 13
    assert launch(32, 32, 0) == 320


def test_the_first_to_finish_are_taken_where_the_rule_says_so() -> None:
    launched = infos(MIXED, MIXED, MIXED, MIXED)
    order = {10: 3, 11: 0, 12: 1, 13: 2}  # 11 was broken off
    finished = [replace(one, finished=order[one.group_id]) for one in launched]
    found = admit(finished, wanted=2, rule=rule(admit="finish"))
    assert (found.admitted, found.surplus, found.unfinished) == ((12, 13), 1, 1)
    assert admit(finished, wanted=2, rule=rule()).admitted == (10, 12)


def test_the_length_bias_of_what_is_admitted() -> None:
    short, long = infos(MIXED), [replace(one, response_tokens=20) for one in infos(MIXED, first=11)]
    assert length_bias([*short, *long], {10}) == 5 / 12.5
    assert length_bias([*short, *long], {10, 11}) == 1.0
    assert length_bias(short, ()) == 1.0


def test_a_prompt_rests_after_being_all_right_in_a_row_and_begins_anew() -> None:
    wanted = rule(rest_after=2, rest_steps=3)
    state = PromptCurriculum({}, {})
    state = state.after(infos(SAME, MIXED), 1, wanted)
    assert (state.in_a_row, state.resting) == ({100: 1}, {})
    state = state.after(infos(SAME, SAME), 2, wanted)
    assert (state.in_a_row, state.resting) == ({101: 1}, {100: 5})
    assert [state.rests(100, step) for step in (3, 4, 5, 6)] == [True, True, True, False]
    assert not state.rests(101, 3)
    state = state.after(infos(MIXED, MIXED), 5, wanted)
    assert (state.in_a_row, state.resting) == ({}, {})


@pytest.mark.parametrize("right", [False, None])
def test_a_prompt_whose_answers_are_not_said_to_be_right_never_rests(right: bool | None) -> None:
    """Whatever its reward: a boxed wrong answer may well have one above 0."""
    unsure = [replace(one, right=right) for one in infos(SAME)]
    assert PromptCurriculum({}, {}).after(unsure, 1, rule(rest_after=1)) == PromptCurriculum({}, {})


def test_without_the_rule_nothing_is_remembered() -> None:
    assert PromptCurriculum({}, {}).after(infos(SAME), 1, rule()) == PromptCurriculum({}, {})
