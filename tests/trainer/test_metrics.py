"""A step's metrics against numpy; every name stands in the metric dictionary."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.loss_metrics import MAXIMA, SUMS, compute_metrics
from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.step_batch import StepBatch
from grpo_mp.batching.updates import PackingRule, plan_updates
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.trainer.collect import generation_times
from grpo_mp.trainer.metrics import (
    distributions,
    packed_tokens,
    reduce_report,
    reward_metrics,
    rollout_metrics,
    update_metrics,
)
from grpo_mp.utils.types import SampleInfo


def info(group_id: int, index: int, reward: float, response: int, version: int = 4, **parts: float) -> SampleInfo:
    return SampleInfo(
        group_id=group_id,
        index=index,
        prompt_tokens=10 + group_id,
        response_tokens=response,
        reward=reward,
        truncated=response == 16,
        oldest_version=version,
        versions_sum=version * response,
        reward_terms=parts,
        is_correct=parts["answer"] >= 1 if "answer" in parts else None,
    )


RULE, LARGE = (PackingRule(LayoutConfig(), 1, tokens, 64) for tokens in (64, 4096))
INFOS = [
    info(0, 0, 1.5, 4, answer=1.0, boxed=1.0),
    info(0, 1, 0.5, 16, answer=0.0, boxed=1.0),
    info(0, 2, 0.0, 7, answer=0.0, boxed=0.0),
    info(5, 0, 0.5, 9, 3, answer=0.0, boxed=1.0),
    info(5, 1, 0.5, 16, 2, answer=0.0, boxed=1.0),
]


def test_rewards_and_lengths_of_a_step() -> None:
    values = rollout_metrics(INFOS, weight_version=4)
    rewards = np.array([1.5, 0.5, 0.0, 0.5, 0.5])
    lengths = np.array([4, 16, 7, 9, 16])
    assert values == pytest.approx(
        {
            "reward/mean": rewards.mean(),
            "reward/std": rewards.std(),
            "reward/min": 0.0,
            "reward/max": 1.5,
            "reward/group_std": (rewards[:3].std() + rewards[3:].std()) / 2,
            "reward/zero_std_ratio": 0.5,
            "reward/term/answer": 0.2,
            "reward/term/boxed": 0.8,
            "rollout/response_length/mean": lengths.mean(),
            "rollout/response_length/correct": 4,
            "rollout/response_length/incorrect": (16 + 7 + 9 + 16) / 4,
            "rollout/response_length/min": 4,
            "rollout/response_length/max": 16,
            "rollout/prompt_length/mean": (3 * 10 + 2 * 15) / 5,
            "rollout/truncated_ratio": 0.4,
            "rollout/accuracy": 0.2,
            "rollout/solve_all": 0,
            "rollout/solve_none": 1,
            **dict.fromkeys((f"rollout/solve_rate/{share}" for share in ("to_25", "to_75", "to_99", "all")), 0),
            "rollout/solve_rate/none": 0.5,
            "rollout/solve_rate/to_50": 0.5,
            "rollout/weight_version_lag/mean": (9 * 1 + 16 * 2) / lengths.sum(),
            "rollout/weight_version_lag/max": 2,
        }
    )
    for name in values:
        assert find_metric(name, "scalar")


def test_episodes_are_counted_by_state() -> None:
    one = replace(INFOS[0], state="completed", given_tokens=2, metrics={"turns": 3.0, "bash_s": 1.5})
    metrics = rollout_metrics([one, replace(one, state="timeout", given_tokens=4, metrics={"turns": 1.0})], 4)
    found = {name: value for name, value in metrics.items() if "episode" in name or "given" in name}
    assert found == {
        **{f"rollout/episodes/{state}": 0.0 for state in ("truncated", "error")},
        **{f"rollout/episodes/{state}": 0.5 for state in ("completed", "timeout")},
        "rollout/episode/turns": 2.0,
        "time/episode/bash_s": 1.5,  # of the episodes that called it
        "rollout/given_tokens/mean": 3.0,
    }
    assert all(find_metric(name, "scalar") for name in found)


def test_acceptance_length_is_a_mean_over_samples() -> None:
    drafted = [replace(info, verify_steps=steps) for info, steps in zip(INFOS, (2, 4, 7, 3, 0), strict=True)]
    assert rollout_metrics(drafted, 4)["rollout/acceptance_length"] == pytest.approx(np.mean([2, 4, 1, 3]))
    assert "rollout/acceptance_length" not in rollout_metrics(INFOS, 4)
    forked = replace(INFOS[0], response_tokens=9, given_tokens=3, verify_steps=2, earlier=(drafted[1],))
    assert rollout_metrics([forked], 4)["rollout/acceptance_length"] == pytest.approx(np.mean([3, 4]))  # generated ones
    assert find_metric("rollout/acceptance_length", "scalar")


def test_updates_are_averaged_but_for_what_only_the_first_one_shows(parallel: Parallel) -> None:
    def update(value: float, grad_norm: float, lr: float, skipped: bool) -> UpdateReport:
        sums = dict.fromkeys((*SUMS, *MAXIMA), torch.tensor(value, dtype=torch.float64))
        sums["tokens"] = torch.tensor(2.0, dtype=torch.float64)
        report = UpdateReport([sums, sums], grad_norm, lr, skipped)
        return replace(report, measured=compute_metrics(reduce_report(report, parallel)))

    plan = plan_updates([info.total_tokens for info in INFOS], 1, PackingRule(LayoutConfig(tensor=4), 2, 64, 64))
    in_loss = tuple(not info.truncated for info in INFOS)
    batch = StepBatch(tuple(INFOS), in_loss, advantages=(), plan=(*plan, *plan, *plan), updates=())
    values = update_metrics([update(1.0, 3.0, 0.1, False), update(3.0, 5.0, 0.2, True)], batch, planned=3)
    assert values["train/loss"] == (2.0 + 6.0) / 2
    assert values["train/entropy"] == (2.0 / 4 + 6.0 / 4) / 2
    assert values["train/ratio/max"] == 3.0
    assert values["mismatch/logprob_abs_diff/mean"] == 2.0 / 4
    assert values["mismatch/logprob_abs_diff/max"] == 1.0
    assert (values["train/grad_norm"], values["train/lr"]) == (4.0, 0.2)
    assert (values["train/updates"], values["train/skipped_updates"]) == (2, 1)
    assert values["train/early_stopped_updates"] == 1
    lengths = [info.total_tokens for info in INFOS]
    # The second update was skipped and the third never began; the samples of 16 tokens are masked.
    assert values["train/tokens"] == 4 + 7 + 9
    padded = 3 * sum(-(-n // 4) * 4 for n in lengths)
    assert values["train/padding_ratio"] == pytest.approx(1 - sum(lengths) / padded)
    for name in values:
        assert find_metric(name, "scalar")


def test_totals_and_corrections_are_those_of_all_updates() -> None:
    """The weights old / rollout do not depend on the update, the off-policy mask grows with it, lost tokens add up."""
    plan = plan_updates([info.total_tokens for info in INFOS], 1, RULE)
    batch = StepBatch(tuple(INFOS), (True,) * len(INFOS), advantages=(), plan=plan * 4, updates=())
    base = dict.fromkeys((*SUMS, *MAXIMA), 0.0) | {"tokens": 10.0}

    def update(number: int) -> UpdateReport:
        sums = base | {
            "mismatch/tokens_without_rollout_logprob": float(number),
            "mismatch/correction/mean": 10.0 + number,
            "mismatch/correction_masked_ratio": float(number),
            "mismatch/off_policy_masked_ratio": float(2 * number),
            "mismatch/kl": 10.0 * (number + 1),
        }
        return UpdateReport([], 0.0, 0.0, skipped=False, measured=compute_metrics(sums))

    for epochs in (1, 2):
        reports = [update(number) for _ in range(epochs) for number in range(4)]
        values = update_metrics(reports, batch, planned=4 * epochs)
        assert values["mismatch/tokens_without_rollout_logprob"] == 0 + 1 + 2 + 3
        assert values["mismatch/correction/mean"] == pytest.approx(np.mean([1.0, 1.1, 1.2, 1.3]))
        assert values["mismatch/correction_masked_ratio"] == pytest.approx(0.15)
        assert values["mismatch/off_policy_masked_ratio"] == pytest.approx(0.3)
        assert values["mismatch/kl"] == 1.0  # of the first, whose weights the engine has


def test_samples_without_a_reward_count_in_lengths_alone() -> None:
    unscored = [replace(info, reward=77.0, is_scored=False, is_correct=None, reward_terms={}) for info in INFOS[3:]]
    values = rollout_metrics([*INFOS[:3], *unscored], 4)
    scored = rollout_metrics(INFOS[:3], 4)
    assert {n: v for n, v in values.items() if n.startswith("reward/")} == {
        n: v for n, v in scored.items() if n.startswith("reward/")
    }
    assert values["rollout/response_length/mean"] == np.mean([4, 16, 7, 9, 16])
    assert not [name for name in rollout_metrics(unscored, 4) if name.startswith("reward/")]
    assert distributions([*INFOS[:3], *unscored], ())["reward/values"] == [1.5, 0.5, 0.0]


def test_a_shared_prompt_is_one_packed_prompt() -> None:
    infos = [replace(info, group_id=7, prompt_tokens=11) for info in INFOS]
    lengths = [info.total_tokens for info in infos]
    plan = plan_updates(lengths, 1, LARGE, prompts=[SamplePrompt(7, 11)] * len(infos))
    batch = StepBatch(tuple(infos), (True,) * len(infos), (), plan, ())
    assert packed_tokens(batch) == 10 + sum(info.response_tokens + 1 for info in infos)
    (rank,) = plan[0].schedule.ranks
    assert packed_tokens(batch) == sum(plan.tokens for plan in rank)  # nothing is padded


def test_kl_is_the_mean_over_the_updates_that_measured_it(parallel: Parallel) -> None:
    """At weight 0 a reference may be asked in one update of the step only."""

    def update(kl: float, kl_tokens: float) -> UpdateReport:
        sums = dict.fromkeys((*SUMS, *MAXIMA), torch.tensor(1.0, dtype=torch.float64))
        sums |= {"kl": torch.tensor(kl).double(), "kl_tokens": torch.tensor(kl_tokens).double()}
        report = UpdateReport([sums], 1.0, 0.1, skipped=False)
        return replace(report, measured=compute_metrics(reduce_report(report, parallel)))

    batch = StepBatch(tuple(INFOS), (True,) * 5, (), plan_updates([30] * 5, 2, RULE), ())
    assert update_metrics([update(0.0, 0.0), update(3.0, 4.0)], batch, planned=2)["train/kl_loss"] == 0.75
    assert "train/kl_loss" not in update_metrics([update(0.0, 0.0)] * 2, batch, planned=2)


def test_a_step_without_any_update() -> None:
    assert update_metrics([], StepBatch((), (), (), (), ()), planned=0) == {"train/updates": 0}


def test_what_the_rewards_met() -> None:
    stats = RewardStats(failures=Counter(mine=2, other=1), unscored=4)
    stats.log("a/b", 1.0)
    stats.log("a/b", 2.0)
    values = reward_metrics(stats)
    assert values == {"reward/failures": 3, "reward/unscored": 4, "reward/log/a_b": 1.5}
    for name in values:
        assert find_metric(name, "scalar")


def test_the_slowest_engine_and_the_tail() -> None:
    fast = 1000, [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0]  # 200 tokens/s
    slow = 500, [6.0, 10.0]  # 50 tokens/s; the ninth group of ten ends at 6 s, the last at 10 s
    found = generation_times([fast, slow])
    assert found == pytest.approx({"speed/slowest_engine_ratio": 0.25, "time/generate_tail_share": 0.4})
    assert all(find_metric(name, "scalar") for name in found)


def test_engines_without_groups_of_the_step_do_not_count() -> None:
    idle = (0, list[float]())
    assert generation_times([idle, (10, [2.0, 2.0])])["speed/slowest_engine_ratio"] == 1.0
    assert generation_times([idle]) == generation_times([(7, [0.0])]) == {}
