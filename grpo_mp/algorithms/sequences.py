"""Sums over full sequences inside a packed micro-batch, also where context parallelism divides them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_mp.utils.types import MicroBatch

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold parts of the same sequences


@dataclass(frozen=True)
class Sequences:
    """The response tokens of a micro-batch by sequence."""

    index: Tensor  # int64 [T]; padding counts to the first sequence, with a mask of 0
    mask: Tensor  # float64 [T]
    count: int
    reduce: Reduce

    @staticmethod
    def from_batch(batch: MicroBatch, reduce: Reduce) -> "Sequences":
        """Take the response tokens with a finite rollout logprob; the others are no part of their sequence."""
        mask = batch.mask.double() * batch.rollout_logprobs.isfinite()
        return Sequences(batch.sequence_index.clamp(min=0), mask, max(1, len(batch.sample_ids)), reduce)

    def sums(self, values: Tensor) -> Tensor:
        """Sum the response tokens of a sequence, at every one of its tokens: [T] -> [T].

        The gradient goes to every token of the sequence, on whatever rank it is.
        """
        summed: Tensor = _SequenceSum.apply(values, self)
        return summed

    def means(self, values: Tensor) -> Tensor:
        """Average the response tokens of a sequence, at every one of its tokens: [T] -> [T]."""
        return self.sums(values) / self.sums(torch.ones_like(self.mask)).clamp(min=1)

    def _sum_and_broadcast(self, values: Tensor) -> Tensor:
        zeros = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        masked = values.where(self.mask.bool(), 0.0)
        return self.reduce(zeros.index_add(0, self.index, masked.double()))[self.index]


class _SequenceSum(torch.autograd.Function):
    """y_t = sum of x_u over the sequence of t, and back: dL/dx_u = sum of dL/dy_t over the same tokens."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return sequences._sum_and_broadcast(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sequences: Sequences = ctx.sequences
        return sequences._sum_and_broadcast(gradients[0]) * sequences.mask, None
