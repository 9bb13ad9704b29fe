"""Parts of a step of supervised fine-tuning: batch, update, metrics, held-out losses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_mp.algorithms.losses import SUPERVISED_SUMS, merge_sums, supervised_metrics, token_mean_loss
from grpo_mp.batching.updates import PackingRule, UpdatePlan, microbatches, plan_updates
from grpo_mp.data.chat_data import ChatSet
from grpo_mp.data.cursor import Cursor, take
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.monitor.timeline import StepSummary
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.metrics import mtp_metrics
from grpo_mp.utils.types import MicroBatch


@dataclass(frozen=True)
class SupervisedBatch:
    """Plan of an update, and this rank's micro-batches. `lengths`, `learned`: tokens and loss tokens of each sample."""

    plan: UpdatePlan
    microbatches: tuple[MicroBatch, ...]
    lengths: tuple[int, ...]
    learned: tuple[int, ...]

    @property
    def padded_tokens(self) -> int:
        return sum(plan.tokens for rank in self.plan.schedule.ranks for plan in rank if plan.samples)


@dataclass(frozen=True)
class SftBatch:
    """Batch of a step: indices into the train set, cursor of the next step, and the packed update."""

    indices: tuple[int, ...]
    cursor: Cursor
    packed: SupervisedBatch


def next_batch(train: ChatSet, cursor: Cursor, count: int, shuffle: bool, max_tokens: int, policy: Policy) -> SftBatch:
    """Return the next `count` samples after `cursor`, with this rank's samples packed into micro-batches."""
    indices, cursor = take(cursor, train.epoch_size, count, shuffle, mixture=train.mixture)
    return SftBatch(indices, cursor, pack_samples(train, indices, max_tokens, policy))


def pack_samples(data: ChatSet, indices: Sequence[int], max_tokens: int, policy: Policy) -> SupervisedBatch:
    """Plan an update on the samples at `indices`, equal on all ranks, and pack the samples of this rank.

    The loss is the mean over all loss tokens of the update.
    """
    lengths, learned = data.sizes[list(indices)].T.tolist()
    parallel = policy.parallel
    hidden_size = policy.config.hidden_size
    rule = PackingRule(
        *(parallel.layout, parallel.dp_size, max_tokens, hidden_size),
        pad_multiple=policy.padding_multiple,
        with_mtp=policy.mtp_loss is not None,
    )
    (plan,) = plan_updates(lengths, 1, rule)
    data_rank = parallel.coords.data
    context_rank = parallel.coords.context
    samples = {place: data[indices[place]] for place in plan.samples_of(data_rank)}
    zeros = [0.0] * len(lengths)
    weights = [1.0 / max(1, sum(learned))] * len(lengths)
    batches = microbatches(plan, samples, zeros, loss_weights=weights, data_rank=data_rank, context_rank=context_rank)
    return SupervisedBatch(plan, tuple(batches), tuple(lengths), tuple(learned))


def supervised_update(policy: Policy, batch: SupervisedBatch) -> tuple[UpdateReport, dict[str, float]]:
    """Run one optimizer update; return its report and its loss metrics over all ranks."""
    report = policy.update(batch.microbatches, token_mean_loss)
    measured = supervised_metrics(reduce_sums(report.losses, policy.parallel))
    measured |= policy.indexer_loss.take_metrics() if policy.indexer_loss else {}
    return report, measured | mtp_metrics(policy.mtp_loss, policy.parallel, sampled=False)


def reduce_sums(reports: Sequence[torch.Tensor], parallel: Parallel) -> dict[str, float]:
    """Return SUPERVISED_SUMS of an update's micro-batches, summed over all ranks."""
    sums = merge_sums(reports if parallel.coords.tensor == 0 else ())  # tensor ranks report the same tokens
    dist.all_reduce(sums, group=parallel.cpu_group)
    return dict(zip(SUPERVISED_SUMS, sums.tolist(), strict=True))


def held_out_losses(
    policy: Policy, evals: Mapping[str, ChatSet], batch_size: int, max_tokens: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the metric of each held-out set: the mean loss over its loss tokens."""
    for name, data in evals.items():
        loss = tokens = 0.0
        for start in range(0, len(data), batch_size):
            batch = pack_samples(data, range(start, min(start + batch_size, len(data))), max_tokens, policy)
            outputs = policy.logprobs(batch.microbatches)
            reports = [
                token_mean_loss(output[0], output[1], microbatch)[1]
                for output, microbatch in zip(outputs, batch.microbatches if outputs else (), strict=True)
            ]
            sums = reduce_sums(reports, policy.parallel)
            loss = loss + sums["loss"] * sum(batch.learned)
            tokens = tokens + sum(batch.learned)
        yield name, {metric_name("eval/{set}/loss", set=name): loss / tokens}


def sft_metrics(
    batch: SupervisedBatch, report: UpdateReport, measured: Mapping[str, float], summary: StepSummary, ranks: int
) -> dict[str, float]:
    """Return the SFT metrics of a step. `measured`: metrics of the loss; `ranks`: number of ranks of the job."""
    tokens = sum(batch.lengths)
    learned = sum(batch.learned)
    return {
        **measured,
        **report.measured,
        "sft/length/mean": tokens / len(batch.lengths),
        "sft/length/max": max(batch.lengths),
        "sft/learned_ratio": learned / tokens,
        "train/grad_norm": report.grad_norm,
        "train/lr": report.lr,
        "train/updates": 1,
        "train/skipped_updates": int(report.skipped),
        "train/tokens": 0 if report.skipped else learned,
        "train/padding_ratio": 1 - tokens / batch.padded_tokens,
        "speed/train_tokens_per_s": tokens / summary.seconds["TRAIN"],
        "speed/samples_per_s": len(batch.lengths) / summary.wall_s,
        "speed/tokens_per_s_per_gpu": tokens / summary.wall_s / ranks,
    }
