"""The critic's metrics of a step, under the names of the metric dictionary."""

import statistics
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from grpo_mp.algorithms.values import LOSS_SUMS, RETURN_SUMS, return_sums, value_metrics
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.utils.types import MicroBatch


def reduce_value_losses(report: UpdateReport, parallel: Parallel) -> dict[str, float]:
    """Return LOSS_SUMS of one update over the job. Every rank must call this."""
    sums = torch.zeros(len(LOSS_SUMS), dtype=torch.float64)
    if report.losses and parallel.coords.tensor == 0:  # tensor ranks have the same tokens
        sums = torch.stack(report.losses).sum(0).cpu()
    dist.all_reduce(sums, group=parallel.cpu_group)
    return dict(zip(LOSS_SUMS, sums.tolist(), strict=True))


def critic_metrics(
    reports: Sequence[UpdateReport], updates: Sequence[Sequence[MicroBatch]], parallel: Parallel
) -> dict[str, float]:
    """Return the critic's metrics of a step; nothing where there is none. Every rank must call this."""
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
