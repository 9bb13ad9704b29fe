"""Advantages against their formulas, written out group by group in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.algorithms.advantages import (
    EPS,
    estimate_advantages,
    estimate_decoupled,
    estimate_outcome,
    estimate_process,
    load_estimator,
    outcome_advantages,
)
from grpo_mp.algorithms.settings import AdvantageConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleInfo
from tests.algorithms.objective import sample_infos

GROUPED_REWARDS = st.lists(
    st.tuples(st.integers(0, 5), st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.floats(-1e3, 1e3))), max_size=40
)
KINDS = st.tuples(
    st.sampled_from(["group_mean", "leave_one_out", "none"]),
    st.sampled_from(["group_std", "batch_std", "group_mean", "none"]),
)


def advantages(rewards: Sequence[float], group_ids: Sequence[int], **settings: Any) -> tuple[float, ...]:
    return outcome_advantages(rewards, group_ids, AdvantageConfig(**settings))


def expected_advantages(rewards: Sequence[float], group_ids: Sequence[int], baseline: str, scale: str) -> list[float]:
    """(r - baseline) / (std + eps), std over n - 1; zero where no reward of the group differs."""
    expected = []
    for i, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        members = [j for j, other in enumerate(group_ids) if other == group_id]
        group = [rewards[j] for j in members]
        others = [rewards[j] for j in members if j != i]
        if baseline != "none" and min(group) == max(group):
            expected.append(0.0)
            continue
        if baseline == "none":
            gain = reward
        elif baseline == "leave_one_out":
            gain = reward - math.fsum(others) / len(others)
        else:
            gain = reward - math.fsum(group) / len(group)
        if scale == "group_mean":
            expected.append(float(gain / (math.fsum(group) / len(group) + EPS)))
            continue
        population = {"group_std": group, "batch_std": rewards, "none": None}[scale]
        if population is not None:
            gain /= (float(np.std(population, ddof=1)) if len(population) > 1 else 0.0) + EPS
        expected.append(float(gain))
    return expected


def tolerances(rewards: Sequence[float], scaled: bool) -> dict[str, float]:
    """Bound how far two computations in float64 may be apart, whatever the order of their sums.

    A sum of n terms is off by n U of its size at most: a mean by (n + 1) U R, with R the largest reward, and so is the
    gain over it, apart from U of itself; a deviation by n / 2 + 2 roundings of its own size, at most 1.5 R, and by the
    mean's error. The gain is divided by no less than EPS, so that relative to it the deviation is off by its error
    over EPS. Twice each, for both sides.
    """
    unit = 2.0**-53
    count = len(rewards)
    largest = max(map(abs, rewards), default=0.0)
    mean = (count + 1) * unit * largest
    deviation = (count / 2 + 2) * unit * 1.5 * largest + mean
    return {
        "atol": 2 * mean / (EPS if scaled else 1.0),
        "rtol": 2 * (4 * unit + (deviation / EPS if scaled else 0.0)),
    }


@given(GROUPED_REWARDS, KINDS)
def test_any_rewards_in_any_groups(samples: list[tuple[int, float]], kind: tuple[str, str]) -> None:
    group_ids = [group for group, _ in samples]
    rewards = [reward for _, reward in samples]
    baseline, scale = kind
    if scale == "group_mean":
        rewards = [abs(reward) for reward in rewards]
    actual = advantages(rewards, group_ids, baseline=baseline, scale=scale)
    np.testing.assert_allclose(
        actual, expected_advantages(rewards, group_ids, baseline, scale), **tolerances(rewards, scale != "none")
    )


def test_a_negative_reward_has_no_share_of_the_group_s_mean() -> None:
    with pytest.raises(UserError, match=r"a reward is -0\.5: give rewards of 0 or more, or set another scale"):
        advantages([1.0, -0.5], [0, 0], scale="group_mean")


def test_one_group_by_hand() -> None:
    assert advantages([0.0, 1.0, 2.0], [7, 7, 7]) == (-1.0 / (1.0 + EPS), 0.0, 1.0 / (1.0 + EPS))
    assert advantages([0.0, 1.0, 5.0], [7, 7, 7], scale="none") == (-2.0, -1.0, 3.0)
    assert advantages([0.0, 1.0, 5.0], [7, 7, 7], scale="none", baseline="leave_one_out") == (-3.0, -1.5, 4.5)


@pytest.mark.parametrize("reward", [1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_group_without_difference_is_exactly_zero(reward: float, size: int, baseline: str) -> None:
    actual = advantages([reward] * size + [0.0, 1.0], [4] * size + [2, 2], baseline=baseline)
    assert actual[:size] == (0.0,) * size
    assert actual[size] == -actual[size + 1] < 0


def test_missing_parts_and_zero_std_groups_count_nothing() -> None:
    parts = [{"a": 1.0}, {"a": 0.0}, {"a": 1.0, "b": 3.0}]
    samples = sample_infos([0, 0, 0], parts)
    config = AdvantageConfig()
    only_a = estimate_decoupled(samples, config, {"a": 1.0})
    assert estimate_decoupled(samples, config, {"a": 1.0, "b": 1.0}) == only_a
    assert estimate_decoupled(sample_infos([0, 0, 0], [{"a": 1.0}] * 3), config, {"a": 1.0}) == (0.0, 0.0, 0.0)


def test_a_token_gains_from_every_step_that_ends_after_it() -> None:
    samples = sample_infos([4, 4], steps=[((1, 0.0), (3, 1.0)), ((2, 0.5),)], lengths=[5, 3])
    actual = estimate_process(samples, AdvantageConfig(level="process"), {})
    rewards = np.array([0.0, 1.0, 0.5])
    first, second, third = (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPS)
    np.testing.assert_allclose(actual[0], [first + second] * 2 + [second] * 2 + [0.0])
    np.testing.assert_allclose(actual[1], [third] * 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.floats(-5, 5)), min_size=1, max_size=20))
def test_one_step_at_the_end_is_the_outcome_advantage(samples: list[tuple[int, int, float]]) -> None:
    ids, lengths, rewards = (list(column) for column in zip(*samples, strict=True))
    settings = AdvantageConfig(level="process")
    steps = [((length - 1, reward),) for length, reward in zip(lengths, rewards, strict=True)]
    infos = sample_infos(ids, rewards=rewards, steps=steps, lengths=lengths)
    singles = estimate_outcome(infos, settings, {})
    for values, single in zip(estimate_process(infos, settings, {}), singles, strict=True):
        assert set(values.tolist()) == {single}


UNSCORED = -99.0  # what an unscored sample happens to hold as its reward


@pytest.mark.parametrize(
    "settings",
    [
        {"baseline": baseline, "scale": scale}
        for baseline in ("group_mean", "leave_one_out", "none")
        for scale in ("group_std", "batch_std", "none")
        if (baseline, scale) != ("none", "group_std")
    ]
    + [{"combine": "normalize"}],
    ids=str,
)
def test_samples_without_a_reward_count_nowhere(settings: dict[str, str]) -> None:
    """Neither in mean, deviation, leave-one-out nor batch: the others are as if they had not been drawn."""
    ids = [3, 3, 3, 3, 5, 5, 5, 8, 8]
    rewards = [1.0, 0.0, UNSCORED, 0.5, UNSCORED, 2.0, 1.5, UNSCORED, UNSCORED]
    parts = [{} if reward == UNSCORED else {"answer": reward, "boxed": reward**2} for reward in rewards]
    parts[2] = {"boxed": 7.0}  # the other term failed, so nothing of this sample counts
    advantage = AdvantageConfig.model_validate(settings)
    weights = {"answer": 1.0, "boxed": 0.5}
    infos = [
        replace(info, is_scored=info.reward != UNSCORED) for info in sample_infos(ids, parts=parts, rewards=rewards)
    ]
    estimator = load_estimator(advantage)
    found = estimate_advantages(estimator, infos, advantage, weights)
    kept = [info for info in infos if info.is_scored]
    expected = iter(estimate_advantages(estimator, kept, advantage, weights))
    assert found == [next(expected) if info.is_scored else 0.0 for info in infos]
    if settings.get("combine") is None:
        by_formula = expected_advantages(
            [info.reward for info in kept], [info.group_id for info in kept], settings["baseline"], settings["scale"]
        )
        assert [value for value, info in zip(found, infos, strict=True) if info.is_scored] == pytest.approx(by_formula)


def test_rewards_of_steps_count_where_the_answer_has_none() -> None:
    advantage = AdvantageConfig(level="process")
    infos = [replace(info, is_scored=False) for info in sample_infos([1, 1], steps=[((4, 1.0),), ((4, 0.0),)])]
    first, second = estimate_advantages(load_estimator(advantage), infos, advantage, {})
    assert [float(torch.as_tensor(one)[0]) for one in (first, second)] == pytest.approx(
        [0.5 / (0.5**0.5 + EPS), -0.5 / (0.5**0.5 + EPS)]
    )


def test_pass_at_k_rewards_the_lead_of_the_best_sample() -> None:
    """The advantage of a sample is what the group's maximum would lose without it (arXiv 2503.19595, eq. 6)."""
    ids = [0, 1, 0, 0, 1, 2, 3, 3]
    rewards = [0.2, 1.0, 0.9, 0.5, 1.0, 0.7, 0.0, 1.0]
    groups = {number: [i for i, other in enumerate(ids) if other == number] for number in ids}
    expected = [
        max(rewards[j] for j in groups[number]) - max(rewards[j] for j in groups[number] if j != i)
        if len(groups[number]) > 1
        else 0.0
        for i, number in enumerate(ids)
    ]
    samples = sample_infos(ids, rewards=rewards)
    plain = AdvantageConfig(estimator="pass_at_k", scale="none")
    found = estimate_advantages(load_estimator(plain), samples, plain, {})
    assert found == pytest.approx(expected, abs=1e-15)
    by_std = plain.model_copy(update={"scale": "group_std"})
    std = float(np.std([0.2, 0.9, 0.5], ddof=1))
    assert estimate_advantages(load_estimator(by_std), samples, by_std, {})[2] == pytest.approx(0.4 / (std + EPS))


def test_roles_are_compared_with_the_same_role_of_the_group() -> None:
    """The first player always wins in group 0: its advantage is 0, as is the second's, whatever the group's mean."""
    wins = {0: [(1.0, 0.0)] * 3, 1: [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]}
    infos = []
    for group, games in wins.items():
        for index, (first, second) in enumerate(games):
            other = SampleInfo(group, index, 3, 4, 0.0, False, 0, step_rewards=((3, second),), part=1, role="second")
            info = SampleInfo(group, index, 3, 5, 0.5, False, 0, step_rewards=((2, first),), earlier=(other,))
            if (group, index) == (1, 2):  # the first player had the last turn, or the second
                info = replace(
                    info,
                    step_rewards=((2, second),),
                    role="second",
                    earlier=(replace(other, step_rewards=((3, first),), role=""),),
                )
            infos.append(info)
    advantage = AdvantageConfig(estimator="roles")
    found = [torch.as_tensor(values) for values in estimate_advantages(load_estimator(advantage), infos, advantage, {})]
    assert all(torch.equal(values, torch.zeros(9, dtype=torch.float64)) for values in found[:3])
    lead, behind = ((value - 1 / 3) / ((1 / 3) ** 0.5 + EPS) for value in (1.0, 0.0))
    expected = [[-lead] * 4 + [lead] * 5, [-behind] * 4 + [behind] * 5, [behind] * 4 + [-behind] * 5]
    for values, of_tokens in zip(found[3:], expected, strict=True):
        assert values.tolist() == pytest.approx(of_tokens)
