"""Fingerprints of tensors, to detect changes; computed on the tensors' device."""

from typing import Final

import torch
from torch import Tensor

CHUNK_WORDS: Final = 2**20  # 8 MiB; the temporary memory of a fingerprint is three times that
WORD_BYTES = 8
MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15


def random_factors(count: int) -> Tensor:
    """Return odd random numbers, int64 [count], equal on every rank and in every run."""
    generator = torch.Generator().manual_seed(0)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(low, high, (count,), generator=generator) | 1


@torch.no_grad()
def fingerprint(tensor: Tensor, factors: Tensor) -> int:
    """Return a 64-bit hash of a tensor, based on the sum of its 64-bit words, each multiplied by a random factor.

    `factors`: see `random_factors`. Tensors that differ in a single word never collide; others collide with a
    probability of at most 2**-32.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // WORD_BYTES * WORD_BYTES
    sums = [_hash(chunk, factors) for chunk in flat[:whole].view(torch.int64).split(len(factors))]
    if whole < len(flat):
        tail = torch.cat([flat[whole:], flat.new_zeros(WORD_BYTES - len(flat) + whole)])
        sums.append(_hash(tail.view(torch.int64), factors))
    total = 0
    for number in torch.stack(sums).tolist():
        total = (total * ODD + number) & MASK  # makes the hash depend on the order of the chunks
    return total


def _hash(words: Tensor, factors: Tensor) -> Tensor:
    # The low bits of a product depend only on the low bits of its factors. Without the exclusive or, a change of the
    # last bfloat16 number in a word would affect only the sixteen highest bits of the hash.
    return ((words ^ ((words >> 32) & 0xFFFFFFFF)) * factors[: len(words)]).sum()
