"""Sums over whole sequences inside a packed micro-batch, also where context parallelism divides them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_mp.types import MicroBatch

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold parts of the same sequences


def alone(values: Tensor) -> Tensor:
    """The reduction where no sequence is divided."""
    return values


@dataclass(frozen=True)
class Sequences:
    """The response tokens of a micro-batch by sequence."""

    of: Tensor  # int64 [T]; padding counts to the first sequence, with a mask of 0
    mask: Tensor  # float64 [T]
    count: int
    reduce: Reduce

    @staticmethod
    def of_batch(batch: MicroBatch, reduce: Reduce) -> "Sequences":
        """Take the response tokens whose engine logprob is a number: the others have no part in their sequence."""
        mask = batch.mask.double() * batch.rollout_logprobs.isfinite()
        return Sequences(batch.sequence.clamp(min=0), mask, max(1, len(batch.sample_ids)), reduce)

    def sums(self, values: Tensor) -> Tensor:
        """Sum the response tokens of a sequence, at every one of its tokens: [T] -> [T].

        The gradient goes to every token of the sequence, on whatever rank it is.
        """
        summed: Tensor = _SequenceSum.apply(values, self)
        return summed

    def means(self, values: Tensor) -> Tensor:
        """Take the mean instead: [T] -> [T]."""
        return self.sums(values) / self.sums(torch.ones_like(self.mask)).clamp(min=1)

    def _spread(self, values: Tensor) -> Tensor:
        empty = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        kept = values.where(self.mask.bool(), 0.0)
        return self.reduce(empty.index_add(0, self.of, kept.double()))[self.of]


class _SequenceSum(torch.autograd.Function):
    """y_t = sum of x_u over the sequence of t, and back: dL/dx_u = sum of dL/dy_t over the same tokens."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return sequences._spread(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sequences: Sequences = ctx.sequences
        return sequences._spread(gradients[0]) * sequences.mask, None
