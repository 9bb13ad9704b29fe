import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.algorithms.settings import CurriculumConfig, FilterConfig
from grpo_mp.batching.group_selection import (
    Admission,
    AdmissionRule,
    PromptCurriculum,
    Verdict,
    admission_rule,
    admit,
    length_bias,
)
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleInfo


def make_infos(*groups: tuple[float, ...], first: int = 10) -> list[SampleInfo]:
    """Make one group for each tuple of rewards; prompts are numbered from 100."""
    return [
        SampleInfo(first + group, index, 3, 5, reward, False, 0, prompt=100 + group, is_correct=reward >= 1)
        for group, rewards in enumerate(groups)
        for index, reward in enumerate(rewards)
    ]


SAME = (1.0, 1.0)
MIXED = (0.0, 1.0)


def run_to_end(kept: Sequence[bool], rule: AdmissionRule, draw: Callable[[int], int]) -> tuple[Admission, list[int]]:
    """Launch what the rule allows and finish one running group after the other, by `draw`; return what was launched."""
    verdicts = list[Verdict]()
    running = list[int]()
    launched = list[int]()
    while not (admission := admit(verdicts, rule)).done:
        launched += range(len(launched), min(admission.launch_limit, len(kept)))
        running = [number for number in launched if number not in dict(verdicts)]
        number = running[draw(len(running))]
        verdicts.append((number, kept[number]))
    return admission, launched


@given(st.lists(st.booleans(), min_size=60, max_size=60), st.integers(1, 5), st.integers(0, 2), st.data())
def test_the_first_kept_groups_of_the_launch_order_are_taken_whoever_is_faster(
    kept: list[bool], needed: int, max_staleness: int, data: st.DataObject
) -> None:
    rule = admission_rule(FilterConfig(zero_std="refill"), needed, max_staleness)
    admission, launched = run_to_end(kept, rule, lambda count: data.draw(st.integers(0, count - 1)))
    expected = [number for number in range(rule.max_launched) if kept[number]][:needed]
    assert list(admission.selected) == expected
    last = expected[-1] if len(expected) == needed else rule.max_launched - 1
    assert admission.consumed == last + 1
    assert len(launched) <= admission.consumed + rule.lookahead
    if not max_staleness:  # each dropped group is replaced by one: nothing is launched that is not needed
        assert launched == list(range(last + 1))


def test_dropped_groups_are_not_replaced_where_the_rule_says_so() -> None:
    rule = admission_rule(FilterConfig(zero_std="drop"), 3, 0)
    admission, launched = run_to_end([True, False, True, True], rule, lambda count: 0)
    assert (admission.selected, launched, admission.consumed) == ((0, 2), [0, 1, 2], 3)


@given(st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_no_group_begins_more_steps_early_than_is_allowed(needed: int, max_staleness: int, random: Random) -> None:
    rule = admission_rule(FilterConfig(zero_std="refill"), needed, max_staleness)
    begun: dict[int, int] = {}  # group -> step in which it was launched
    finished: dict[int, bool] = {}
    first = 0
    for step in range(12):
        verdicts = [(group - first, is_kept) for group, is_kept in finished.items() if group >= first]
        while not (admission := admit(verdicts, rule)).done:
            for number in range(admission.launch_limit):
                begun.setdefault(first + number, step)
            running = [group for group in begun if group >= first and group not in finished]
            group = random.choice(running)
            finished[group] = random.random() < 0.6
            verdicts.append((group - first, finished[group]))
        assert all(step - begun[first + number] <= max_staleness for number in admission.selected)
        first += admission.consumed


def test_length_bias_counts_groups_past_their_limit_or_says_that_it_knows_nothing() -> None:
    """A long group was aborted and the short one is trained on: that is no 1.0."""
    short = make_infos(MIXED)
    long = [replace(info, response_tokens=20, finished=False) for info in make_infos(MIXED)]
    long = [replace(info, group_id=11) for info in long]
    assert length_bias([*short, *long], {10}, {11}) == 5 / 12.5
    assert math.isnan(length_bias(short, {10}, {11}))


def verdicts(*shares: tuple[int, int]) -> list[SampleInfo]:
    """Four samples a prompt, from 0 on: how many are right, and to how many nothing says whether they are."""
    (info, *_) = make_infos(SAME)
    return [
        replace(info, group_id=prompt, index=i, prompt=prompt, is_correct=None if i >= 4 - unknown else i < right)
        for prompt, (right, unknown) in enumerate(shares)
        for i in range(4)
    ]


def test_prompts_outside_of_the_solve_rates_are_skipped_when_their_window_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_mp.batching.group_selection.SKIP_STEPS", 3)
    rule = CurriculumConfig(window=2, min_rate=0.2, max_rate=0.75)
    state = PromptCurriculum({9: 1, 8: 4}).updated(verdicts((4, 0), (0, 0), (2, 0), (1, 2), (0, 4)), 1, rule)
    assert state.skipped_until == {8: 4}
    assert state.solve_rates == {0: (1.0,), 1: (0.0,), 2: (0.5,), 3: (0.5,)}
    state = state.updated(verdicts((3, 0), (1, 0), (4, 0), (2, 1)), 2, rule)
    assert state.skipped_until == {8: 4, 0: 5, 1: 5}  # 0.875 and 0.125; 0.75 is not above
    assert state.solve_rates == {2: (0.5, 1.0), 3: (0.5, pytest.approx(2 / 3))}
    state = state.updated(verdicts((4, 0), (2, 0), (3, 0)), 6, rule)  # the first two start anew, the third slides
    assert state.skipped_until == {2: 9}
    assert state.solve_rates == {0: (1.0,), 1: (0.5,), 3: (0.5, pytest.approx(2 / 3))}


@pytest.mark.parametrize("right", [False, None])
def test_prompt_without_right_answers_is_never_skipped(right: bool | None) -> None:
    """Whatever its reward: a boxed wrong answer may well have one above 0."""
    not_right = [replace(info, is_correct=right) for info in make_infos(SAME)]
    assert PromptCurriculum({}).updated(not_right, 1, CurriculumConfig(window=1, max_rate=0.9)).skipped_until == {}


def test_an_own_function_says_what_is_skipped_beside_the_rule() -> None:
    def says(samples: Sequence[SampleInfo], step: int) -> dict[int, int]:
        assert {sample.prompt for sample in samples} == {100, 101}
        return {100: step - 1, 101: 9, 7: 6}

    rule = CurriculumConfig(window=1, max_rate=0.9)
    state = PromptCurriculum({7: 20, 8: 20}).updated(make_infos(SAME, SAME), 5, rule, says)
    assert state.skipped_until == {101: 9, 7: 6, 8: 20}  # 100 was taken back
    for wrong in ([1], {0: "later"}, {0: 1.5}, 3):
        with pytest.raises(UserError, match=r"^algorithm.curriculum.function: step 5: it failed: \w+Error: "):
            state.updated(make_infos(SAME, SAME), 5, rule, lambda samples, step, value=wrong: value)
