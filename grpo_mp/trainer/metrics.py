"""Compute the metrics of a step, under their names in the metric dictionary (monitor/metrics.py)."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from typing import Any, get_args

import torch
import torch.distributed as dist

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.loss_metrics import MAXIMA, SUMS, merge_reports
from grpo_mp.algorithms.values import LOSS_SUMS, RETURN_SUMS, return_sums, value_metrics
from grpo_mp.batching.step_batch import StepBatch, student_logprobs
from grpo_mp.distributed.process_groups import Parallel, all_gather
from grpo_mp.monitor.evaluation import EvalScore, means
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.policy.multi_token_prediction import MtpLoss
from grpo_mp.policy.routing_replay import RoutingReplay
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.phase_manager import MemoryUsage, max_usage
from grpo_mp.utils.types import EpisodeState, MicroBatch, PerToken, SampleInfo

EPISODE_METRIC = "rollout/episode/{name}"
EPISODE_TIME = "time/episode/{name}"
# mismatch/ metrics that are means over the updates. Other mismatch/ metrics describe the first update only, for which
# engine and policy have the same weights.
OF_ALL_UPDATES = (
    "mismatch/correction/mean",
    "mismatch/correction_masked_ratio",
    "mismatch/off_policy_masked_ratio",
)
LOST_LOGPROBS = "mismatch/tokens_without_rollout_logprob"  # summed over the updates of one epoch
SOLVE_BINS = ("none", "to_25", "to_50", "to_75", "to_99", "all")  # percent of right answers in a group


def rollout_metrics(infos: Sequence[SampleInfo], weight_version: int) -> dict[str, float]:
    """Return metrics of rewards, lengths and weight versions. `weight_version`: newest version when the step began."""
    rewards = [info.reward for info in infos if info.is_scored]
    lengths = [info.all_response_tokens for info in infos]
    by_group, by_answer = (defaultdict[Any, list[float]](list) for _ in range(2))
    for info in infos:
        if info.is_scored:
            by_group[info.group_id].append(info.reward)
        if info.is_correct is not None:  # growing wrong answers: length bias of arXiv 2503.20783
            by_answer["correct" if info.is_correct else "incorrect"].append(info.all_response_tokens)
    right = accuracy(infos)
    rates = solve_rates(infos)
    bins = [sum(rate > limit for limit in (0.0, 0.25, 0.5, 0.75)) + (rate == 1.0) for rate in rates]
    solved = {
        "rollout/solve_all": rates.count(1.0),
        "rollout/solve_none": rates.count(0.0),
        **{
            metric_name("rollout/solve_rate/{share}", share=share): bins.count(number) / len(bins)
            for number, share in enumerate(SOLVE_BINS)
            if bins
        },
    }
    parts = [part for info in infos for part in info.sequences if part.verify_steps]
    accepted = [part.generated_tokens / part.verify_steps for part in parts]
    spread = dict[str, float]()
    if rewards:
        spread |= {"reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}
        spread |= {"reward/min": min(rewards), "reward/max": max(rewards)}
    if groups := [group for group in by_group.values() if len(group) > 1]:
        spread["reward/group_std"] = statistics.fmean(map(statistics.pstdev, groups))
        spread["reward/zero_std_ratio"] = statistics.fmean(len(set(group)) == 1 for group in groups)
    lag = sum(weight_version * info.all_response_tokens - info.versions_sum for info in infos)
    return {
        **spread,
        **{
            metric_name("reward/term/{name}", name=term): mean
            for term, mean in means(info.reward_terms for info in infos).items()
        },
        "rollout/response_length/mean": statistics.fmean(lengths),
        **{
            metric_name("rollout/response_length/{answer}", answer=a): statistics.fmean(v) for a, v in by_answer.items()
        },
        "rollout/response_length/min": min(lengths),
        "rollout/response_length/max": max(lengths),
        "rollout/prompt_length/mean": statistics.fmean(info.prompt_tokens for info in infos),
        "rollout/truncated_ratio": statistics.fmean(info.truncated for info in infos),
        "rollout/weight_version_lag/mean": lag / sum(lengths),
        "rollout/weight_version_lag/max": weight_version - min(info.oldest_version for info in infos),
        **({"rollout/acceptance_length": statistics.fmean(accepted)} if accepted else {}),
        **({} if right is None else {"rollout/accuracy": right, **solved}),
        **episode_metrics(infos),
    }


def episode_metrics(infos: Sequence[SampleInfo]) -> dict[str, float]:
    """Return the share of episodes in each end state and the means of their metrics; empty without episodes.

    Metrics with names that end with _s are times.
    """
    episodes = [info for info in infos if info.state]
    if not episodes:
        return {}
    return {
        **{
            metric_name("rollout/episodes/{state}", state=state): statistics.fmean(e.state == state for e in episodes)
            for state in get_args(EpisodeState)
        },
        "rollout/given_tokens/mean": statistics.fmean(info.given_tokens for info in episodes),
        **{
            metric_name(EPISODE_TIME if name.endswith("_s") else EPISODE_METRIC, name=name): mean
            for name, mean in means(info.metrics for info in episodes).items()
        },
    }


def solve_rates(infos: Sequence[SampleInfo]) -> list[float]:
    """Return the share of right answers of each group whose reward defines correctness."""
    groups: dict[int, list[SampleInfo]] = defaultdict(list)
    for info in infos:
        groups[info.group_id].append(info)
    return [share for group in groups.values() if (share := accuracy(group)) is not None]


def reward_metrics(stats: RewardStats) -> dict[str, float]:
    """Return failure counts and logged values of the rewards in a step, over all ranks."""
    return {
        "reward/failures": sum(stats.failures.values()),
        "reward/unscored": stats.unscored,
        **{metric_name("reward/log/{name}", name=name): value for name, value in stats.logged.items()},
    }


def distributions(infos: Sequence[SampleInfo], advantages: Sequence[PerToken]) -> dict[str, Sequence[float]]:
    """Return the values of each histogram. `infos`: all samples; `advantages`: of the samples that are trained on."""
    return {
        "reward/values": [info.reward for info in infos if info.is_scored],
        "rollout/response_length/values": [float(info.all_response_tokens) for info in infos],
        "rollout/solve_rate": solve_rates(infos),
        "train/advantages": [float(value) for values in advantages for value in torch.as_tensor(values).flatten()],
    }


def update_metrics(reports: Sequence[UpdateReport], batch: StepBatch, planned: int) -> dict[str, float]:
    """Return metrics of loss and optimizer, averaged over the updates. `planned`: their number without early stop."""
    by_update = [report.measured for report in reports]
    if not by_update:
        return {"train/updates": 0}
    tokens = sum(
        len(plan.samples) and plan.tokens for update in batch.plan for rank in update.schedule.ranks for plan in rank
    )
    unrouted = batch.unrouted_samples
    names = dict.fromkeys(name for measured in by_update for name in measured)
    return {
        **{name: statistics.fmean(m[name] for m in by_update if name in m) for name in names},
        **{
            name: value
            for name, value in by_update[0].items()
            if name.startswith("mismatch/") and name not in OF_ALL_UPDATES
        },
        LOST_LOGPROBS: sum(measured[LOST_LOGPROBS] for measured in by_update[: len(batch.plan)]),
        **{
            name: max(measured[name] for measured in by_update if name in measured)
            for name in ("train/ratio/max", "distill/kl/max")
            if name in names
        },
        "train/grad_norm": statistics.fmean(report.grad_norm for report in reports),
        "train/lr": reports[-1].lr,
        "train/updates": len(reports),
        "train/skipped_updates": sum(report.skipped for report in reports),
        "train/early_stopped_updates": planned - len(reports),
        "train/tokens": sum(
            batch.infos[i].generated_tokens
            for update, report in zip(cycle(batch.plan), reports, strict=False)
            for i in update.samples
            if batch.in_loss[i] and not report.skipped
        ),
        "train/padding_ratio": 1 - packed_tokens(batch) / tokens,
        **({} if unrouted is None else {"rollout/samples_without_routed_experts": unrouted}),
    }


def packed_tokens(batch: StepBatch) -> int:
    """Count the tokens of the step's micro-batches without padding; a shared prompt counts once."""
    plans = [plan for update in batch.plan for rank in update.schedule.ranks for plan in rank]
    saved = sum((prompt.samples - 1) * prompt.tokens for plan in plans for prompt in plan.prompts)
    return sum(info.total_tokens for info in batch.infos) - saved


def logprob_tokens(updates: Sequence[Sequence[MicroBatch]], parallel: Parallel) -> float:
    """Count the tokens without padding over all forward passes of the LOGPROB phase and all ranks."""
    count = torch.zeros((), dtype=torch.float64)
    if parallel.is_reporting_rank:
        for batch in (batch for update in updates for batch in update):
            computed = (batch.old_logprobs, batch.reference_logprobs, batch.values)
            forwards = sum(values is not None for values in computed)
            shared = sum(rows.count for rows in set(batch.prompt_rows))
            count += forwards * ((batch.sequence_index >= 0).sum() + shared)
    dist.all_reduce(count, group=parallel.cpu_group)
    return float(count)


def distillation_metrics(
    updates: Sequence[Sequence[MicroBatch]], distillation: DistillationConfig | None, parallel: Parallel
) -> dict[str, float]:
    """Return mean and maximum of policy logprob - teacher logprob over the sampled tokens; empty without a teacher.

    Also the share of the sampled tokens that a teacher scored.
    """
    if distillation is None:
        return {}
    sums = torch.zeros(3, dtype=torch.float64)
    largest = torch.full((), -math.inf, dtype=torch.float64)
    for batch in (batch for update in updates for batch in update) if parallel.is_reporting_rank else ():
        sums[2] += batch.mask.sum()
        if batch.teacher_logprobs is not None:
            difference = student_logprobs(batch).double() - batch.teacher_logprobs.double()
            difference = difference[batch.mask.bool() & difference.isfinite()]
            sums[:2] += torch.stack([torch.tensor(float(len(difference))), difference.sum()])
            largest = torch.maximum(largest, difference.max()) if len(difference) else largest
    dist.all_reduce(sums, group=parallel.cpu_group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel.cpu_group)
    count, total, tokens = sums.tolist()
    if not count:
        return {"distill/taught_share": 0.0}
    return {
        "distill/taught_share": count / tokens,
        "distill/reverse_kl/mean": total / count,
        "distill/reverse_kl/max": float(largest),
    }


def memory_metrics(usages: Mapping[str, MemoryUsage], parallel: Parallel) -> dict[str, float]:
    """Return the largest memory usage of each phase over all ranks; every rank must pass the same phases."""
    by_rank = all_gather(dict(usages), parallel.cpu_group)
    return {
        metric_name(f"memory/{{phase}}/{kind}", phase=phase.lower()): float(value)
        for phase in usages
        for kind, value in max_usage(of_rank[phase] for of_rank in by_rank)._asdict().items()
    }


def accuracy(infos: Sequence[SampleInfo]) -> float | None:
    """Return the share of right answers; None if the reward defines no correctness."""
    verdicts = [info.is_correct for info in infos if info.is_correct is not None]
    return statistics.fmean(verdicts) if verdicts else None


def eval_metrics(name: str, score: EvalScore) -> dict[str, float]:
    """Return the metrics of one eval set, without unknown values."""
    values = {
        "accuracy": score.accuracy,
        "accuracy_se": score.accuracy_error,
        "reward": score.reward,
        "length": score.length,
        "truncated_ratio": score.truncated_ratio,
        "unanswered": score.unanswered,
    }
    metrics = {
        metric_name(f"eval/{{set}}/{kind}", set=name): value for kind, value in values.items() if value is not None
    }
    for kind, estimates in (("pass", score.pass_at), ("maj", score.maj_at)):
        for k, estimate in estimates.items():
            metrics[metric_name(f"eval/{{set}}/{kind}_at_{{k}}", set=name, k=str(k))] = estimate.value
    return metrics


def eval_reward_metrics(name: str, stats: RewardStats) -> dict[str, float]:
    """Return failure counts and logged values of the rewards on one eval set."""
    logged = {metric_name("eval/{set}/log/{name}", set=name, name=key): value for key, value in stats.logged.items()}
    return logged | {metric_name("eval/{set}/failures", set=name): sum(stats.failures.values())}


def collect_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Return the numbers of selected, launched, carried and dropped groups, and the balance between engines."""
    return {
        "rollout/groups": len({info.group_id for info in rollouts.infos}),
        "rollout/launched_groups": len({info.group_id for info in rollouts.launched}),
        "rollout/carried_groups": rollouts.carried,
        "rollout/length_bias": rollouts.length_bias,
        **rollouts.times,
        "rollout/skipped_prompts": len(rollouts.state.skipped_until),
        **{
            metric_name("rollout/dropped_groups/{reason}", reason=reason): count
            for reason, count in rollouts.dropped.items()
        },
    }


def routing_metrics(replay: RoutingReplay | None, parallel: Parallel) -> dict[str, float]:
    """Return the share of replayed experts that the policy's routers would not have chosen, over the job.

    The value has two names: `update_metrics` keeps the first update for mismatch/, and averages updates for train/.
    """
    if replay is None:
        return {}
    counts = torch.tensor(replay.take_counts(), dtype=torch.float64)
    dist.all_reduce(counts, group=parallel.cpu_group)
    differing, replayed = counts.tolist()
    if not replayed:
        return {}
    return dict.fromkeys(("mismatch/router_diff_ratio", "train/router_diff_ratio"), differing / replayed)


def mtp_metrics(loss: MtpLoss | None, parallel: Parallel, sampled: bool = True) -> dict[str, float]:
    """Return the loss of a trained MTP layer and, if the policy `sampled` the tokens, its acceptance rate."""
    if loss is None:
        return {}
    sums = loss.take_sums()
    sums *= parallel.coords.tensor == 0  # tensor ranks have the same tokens
    dist.all_reduce(sums, group=parallel.cpu_group)
    values = dict(
        zip(("train/mtp_loss", "train/mtp_acceptance"), (sums[:2] / sums[2].clamp(min=1)).tolist(), strict=True)
    )
    return values if sampled else {"train/mtp_loss": values["train/mtp_loss"]}


def reduce_report(report: UpdateReport, parallel: Parallel) -> dict[str, float]:
    """Return SUMS and MAXIMA of one update's loss, reduced over all ranks."""
    reports_losses = bool(report.losses) and parallel.coords.tensor == 0  # tensor ranks report the same tokens
    sums, maxima = merge_reports(report.losses if reports_losses else [])
    dist.all_reduce(sums, group=parallel.cpu_group)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel.cpu_group)
    return dict(zip((*SUMS, *MAXIMA), torch.cat([sums, maxima]).tolist(), strict=True))


def reduce_value_losses(report: UpdateReport, parallel: Parallel) -> dict[str, float]:
    """Return LOSS_SUMS of one critic update, summed over all ranks."""
    sums = torch.zeros(len(LOSS_SUMS), dtype=torch.float64)
    if report.losses and parallel.coords.tensor == 0:  # tensor ranks have the same tokens
        sums = torch.stack(report.losses).sum(0).cpu()
    dist.all_reduce(sums, group=parallel.cpu_group)
    return dict(zip(LOSS_SUMS, sums.tolist(), strict=True))


def critic_metrics(
    reports: Sequence[UpdateReport], updates: Sequence[Sequence[MicroBatch]], parallel: Parallel
) -> dict[str, float]:
    """Return the critic's metrics of a step; empty without a critic."""
    if not reports:
        return {}
    sums = torch.zeros(len(RETURN_SUMS), dtype=torch.float64)
    if parallel.is_reporting_rank:
        sums = return_sums(list(chain.from_iterable(updates)))
    dist.all_reduce(sums, group=parallel.cpu_group)
    losses = {name: statistics.fmean(report.measured[name] for report in reports) for name in LOSS_SUMS}
    return {
        **value_metrics(losses, dict(zip(RETURN_SUMS, sums.tolist(), strict=True))),
        "critic/grad_norm": statistics.fmean(report.grad_norm for report in reports),
        "critic/lr": reports[-1].lr,
        "critic/skipped_updates": sum(report.skipped for report in reports),
    }
