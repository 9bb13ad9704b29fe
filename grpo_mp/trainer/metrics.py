"""A step's numbers under the names of the metric dictionary."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from grpo_mp.algorithms.advantages import groups_without_difference
from grpo_mp.algorithms.report import MAXIMA, SUMS, merge
from grpo_mp.monitor.metrics import fill
from grpo_mp.policy.parallel import Parallel
from grpo_mp.policy.policy import UpdateReport
from grpo_mp.rollout.exchange import SampleInfo
from grpo_mp.scheduler.ledger import Footprint, largest
from grpo_mp.trainer.batch import StepBatch
from grpo_mp.trainer.collect import Collected


def rollout_metrics(infos: Sequence[SampleInfo], weight_version: int) -> dict[str, float]:
    """Rewards and lengths of all samples of a step."""
    rewards, lengths = [info.reward for info in infos], [info.response_tokens for info in infos]
    by_group: dict[int, list[float]] = defaultdict(list)
    for info in infos:
        by_group[info.group_id].append(info.reward)
    lags = [weight_version - info.oldest_version for info in infos]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/group_std": statistics.fmean(statistics.pstdev(group) for group in by_group.values()),
        "reward/zero_std_ratio": len(groups_without_difference(rewards, [info.group_id for info in infos]))
        / len(by_group),
        **_parts(infos),
        "rollout/response_length/mean": statistics.fmean(lengths),
        **_lengths_by_answer(infos),
        "rollout/response_length/min": min(lengths),
        "rollout/response_length/max": max(lengths),
        "rollout/prompt_length/mean": statistics.fmean(info.prompt_tokens for info in infos),
        "rollout/truncated_ratio": statistics.fmean(info.truncated for info in infos),
        "rollout/groups": len(by_group),
        "rollout/weight_version_lag/mean": statistics.fmean(lags),
        "rollout/weight_version_lag/max": max(lags),
    }


def update_metrics(reports: Sequence[UpdateReport], batch: StepBatch) -> dict[str, float]:
    """Means over the step's updates of what the losses measured."""
    named = [report.measured for report in reports]
    if not named:
        return {"train/updates": 0}
    tokens = sum(
        len(plan.samples) and sum(plan.lengths)
        for update in batch.plan
        for rank in update.schedule.ranks
        for plan in rank
    )
    real = sum(info.total_tokens for info in batch.infos)
    return {
        **{name: statistics.fmean(one[name] for one in named) for name in named[0]},
        # Engine and policy hold the same weights only in the first update of the step.
        **{name: value for name, value in named[0].items() if name.startswith("mismatch/")},
        "train/ratio/max": max(one["train/ratio/max"] for one in named),
        "train/grad_norm": statistics.fmean(report.grad_norm for report in reports),
        "train/lr": reports[-1].lr,
        "train/updates": len(reports),
        "train/skipped_updates": sum(report.skipped for report in reports),
        "train/drift_skipped_updates": len(batch.plan) - len(reports),
        "train/tokens": real,
        "train/padding_ratio": 1 - real / tokens,
    }


def memory_metrics(footprints: Mapping[str, Footprint], parallel: Parallel) -> dict[str, float]:
    """The largest footprint of each phase over all ranks. Every rank must call this with the same phases."""
    everyone: list[Mapping[str, Footprint]] = [{}] * parallel.world_size
    dist.all_gather_object(everyone, dict(footprints), group=parallel.host)
    return {
        fill(f"memory/{{phase}}/{kind}", phase=phase.lower()): float(value)
        for phase in footprints
        for kind, value in asdict(largest(rank[phase] for rank in everyone)).items()
    }


def collect_metrics(collected: Collected) -> dict[str, float]:
    """What became of the groups that were launched."""
    return {
        "rollout/launched_groups": len({info.group_id for info in collected.launched}),
        "rollout/rounds": collected.rounds,
        "rollout/length_bias": collected.length_bias,
        "rollout/resting_prompts": len(collected.state.resting),
        **{fill("rollout/dropped_groups/{reason}", reason=why): n for why, n in collected.dropped.items()},
    }


def _lengths_by_answer(infos: Sequence[SampleInfo]) -> dict[str, float]:
    """The length bias that Dr. GRPO names: wrong answers growing while right ones do not."""
    by_answer: dict[str, list[int]] = defaultdict(list)
    for info in infos:
        by_answer["right" if info.right else "wrong"].append(info.response_tokens)
    return {fill("rollout/response_length/{answer}", answer=name): statistics.fmean(v) for name, v in by_answer.items()}


def _parts(infos: Sequence[SampleInfo]) -> dict[str, float]:
    parts: dict[str, list[float]] = defaultdict(list)
    for info in infos:
        for name, value in info.reward_parts.items():
            parts[name].append(value)
    return {fill("reward/part/{name}", name=name): statistics.fmean(values) for name, values in parts.items()}


def reduce_report(report: UpdateReport, parallel: Parallel) -> dict[str, float]:
    """Sums and maxima of one update over the whole job. Every rank must call this."""
    counts = bool(report.losses) and parallel.here.tensor == 0  # tensor ranks report the same tokens
    sums, maxima = merge(report.losses if counts else [])
    dist.all_reduce(sums, group=parallel.host)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel.host)
    return dict(zip((*SUMS, *MAXIMA), torch.cat([sums, maxima]).tolist(), strict=True))
