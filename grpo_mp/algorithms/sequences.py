"""Sums over whole sequences inside a packed micro-batch, also where context parallelism divides them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mp.types import MicroBatch

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold parts of the same sequences


def alone(values: Tensor) -> Tensor:
    """The reduction where no sequence is divided."""
    return values


@dataclass(frozen=True)
class Sequences:
    """The response tokens of a micro-batch by sequence. Nothing here carries a gradient."""

    of: Tensor  # int64 [T]; padding counts to the first sequence, with a mask of 0
    mask: Tensor  # float64 [T]
    count: int
    reduce: Reduce

    @staticmethod
    def of_batch(batch: MicroBatch, reduce: Reduce) -> "Sequences":
        return Sequences(batch.sequence.clamp(min=0), batch.mask.double(), max(1, len(batch.sample_ids)), reduce)

    def sums(self, values: Tensor) -> Tensor:
        """[T] -> [T]: at every token the sum over the response tokens of its sequence."""
        empty = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return self.reduce(empty.index_add(0, self.of, values.detach() * self.mask))[self.of]

    def means(self, values: Tensor) -> Tensor:
        """[T] -> [T]: the mean instead."""
        return self.sums(values) / self.sums(torch.ones_like(self.mask)).clamp(min=1)
