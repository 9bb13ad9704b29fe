"""The loss of supervised fine-tuning: the mean of -log p over the tokens of an update that are learned."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grpo_mp.utils.types import MicroBatch

SUMS = ("loss", "entropy", "tokens")  # of a micro-batch: its share of the loss; sums over the learned tokens


def token_mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the share of a micro-batch in the update's loss, in nats, and SUMS [3] in float64.

    `logprobs`, `entropy`: [T] of each next token. `batch.loss_weights` hold the denominator, the learned tokens of the
    whole update, on all ranks.
    """
    batch = batch.to(logprobs.device)
    learned = batch.mask.bool()  # what is masked out may be infinite
    loss = -(logprobs.where(learned, 0.0) * batch.loss_weights).sum()
    sums = torch.stack([loss.detach(), entropy.detach().where(learned, 0.0).sum().double(), learned.sum().double()])
    return loss.to(logprobs.dtype), sums


def merge_sums(reports: Sequence[Tensor]) -> Tensor:
    """Add the SUMS of micro-batches: float64 on the CPU, ready to be reduced over the job."""
    return torch.stack(list(reports)).sum(0).cpu() if reports else torch.zeros(len(SUMS), dtype=torch.float64)


def supervised_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update from its reduced SUMS. Pure."""
    return {"sft/loss": sums["loss"], "train/entropy": sums["entropy"] / max(sums["tokens"], 1.0)}
