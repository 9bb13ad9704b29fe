"""Fingerprints of tensors, computed on their device."""

from typing import Final

import torch
from torch import Tensor

CHUNK_WORDS: Final = 2**20  # 8 MiB; the temporary memory of a fingerprint is three times that
WORD_BYTES = 8
MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15


def random_factors(count: int) -> Tensor:
    """Return int64 [count] of odd random numbers, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(0)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(low, high, (count,), generator=generator) | 1


@torch.no_grad()
def fingerprint(tensor: Tensor, factors: Tensor) -> int:
    """Return a 64-bit hash of a tensor, computed on its device: a sum of its words times random `factors`.

    Tensors that differ in one word never collide, others at worst once in 2**32.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // WORD_BYTES * WORD_BYTES
    sums = [_hash(chunk, factors) for chunk in flat[:whole].view(torch.int64).split(len(factors))]
    if whole < len(flat):
        tail = torch.cat([flat[whole:], flat.new_zeros(WORD_BYTES - len(flat) + whole)])
        sums.append(_hash(tail.view(torch.int64), factors))
    total = 0
    for number in torch.stack(sums).tolist():
        total = (total * ODD + number) & MASK  # so that the order of chunks counts
    return total


def _hash(words: Tensor, factors: Tensor) -> Tensor:
    # A product's low bits depend on the low bits only: without the exclusive or, changes of the last number in each
    # word would be told from the sixteen highest bits alone.
    return ((words ^ ((words >> 32) & 0xFFFFFFFF)) * factors[: len(words)]).sum()
