"""Causal attention on a CPU for packed sequences, latent-attention head sizes and context parallelism.

A packed batch is a row of tokens [T, ...]. Sequences of similar length are batched in buckets [n, L], right-padded to
the bucket's longest: under a causal mask no real token attends to the padding, so no mask tensor is needed. A position
in a bucket is a cell; index tensors map tokens to cells and back.

A sequence may attend to a prefix of keys before its own. Sequences of a bucket share the prefix length and one mask.

With context parallelism a sequence is cut into 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r.
Keys and values are gathered from all ranks; each query is put in its cell of the full sequence, and the
cells of other ranks' queries are computed but not read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class CellIndex:
    """The maps `token_of_cell` [cells] (any token for padding) and `cell_of_token` [tokens]."""

    token_of_cell: Tensor
    cell_of_token: Tensor


@dataclass(frozen=True)
class Packing:
    """Buckets as (sequences, length, prefix), and the cell indices of this rank's queries and of all keys."""

    buckets: tuple[tuple[int, int, int], ...]
    queries: CellIndex
    keys: CellIndex


def bucket_by_length(lengths: tuple[int, ...], prefixes: tuple[int, ...] = ()) -> list[list[int]]:
    """Group sequences by equal prefix and similar length, longest first; at most a tenth of each row is padding."""
    prefixes = prefixes or (0,) * len(lengths)
    buckets: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (prefixes[i], -lengths[i])):
        longest = buckets[-1][0] if buckets else i
        if buckets and prefixes[i] == prefixes[longest] and 10 * lengths[i] >= 9 * lengths[longest]:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets


def zigzag_positions(length: int, cp: int, rank: int) -> Tensor:
    """Return the positions of the tokens that context-parallel rank `rank` holds of a sequence of `length` tokens."""
    if cp == 1:
        return torch.arange(length)
    first, last = (torch.arange(length).chunk(2 * cp)[i] for i in (rank, 2 * cp - 1 - rank))
    return torch.cat([first, last])


@lru_cache(maxsize=64)
def plan_packing(lengths: tuple[int, ...], cp: int = 1, rank: int = 0, prefixes: tuple[int, ...] = ()) -> Packing:
    """Plan the packing of sequences of these full lengths for one of `cp` context-parallel ranks.

    `prefixes`, without context parallelism only: how many keys each sequence has before its own.
    """
    prefixes = prefixes or (0,) * len(lengths)
    buckets = bucket_by_length(lengths, prefixes)
    shapes = tuple((len(bucket), lengths[bucket[0]], prefixes[bucket[0]]) for bucket in buckets)
    key_lengths = tuple(n + prefix for n, prefix in zip(lengths, prefixes, strict=True))
    queries = _cell_index(buckets, lengths, cp, [rank])
    same = cp == 1 and not any(prefixes)
    return Packing(shapes, queries, queries if same else _cell_index(buckets, key_lengths, cp, range(cp)))


def _cell_index(buckets: list[list[int]], lengths: tuple[int, ...], cp: int, ranks: Iterable[int]) -> CellIndex:
    first_cell, cells = [0] * len(lengths), 0
    for bucket in buckets:
        longest = lengths[bucket[0]]
        for i in bucket:
            first_cell[i] = cells
            cells += longest
    positions = [zigzag_positions(n, cp, r) + cell for r in ranks for n, cell in zip(lengths, first_cell, strict=True)]
    cell_of_token = torch.cat(positions)
    token_of_cell = torch.zeros(cells, dtype=torch.long)
    token_of_cell[cell_of_token] = torch.arange(len(cell_of_token))
    return CellIndex(token_of_cell, cell_of_token)


class _ToCells(torch.autograd.Function):
    """Gathers tokens [T, ...] into cells [C, ...]. Padding cells pass no gradient back: theirs is 0.

    torch's own backward pass would add up all cells.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: CellIndex) -> Tensor:
        ctx.index = index
        return tokens.index_select(0, index.token_of_cell)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.index.cell_of_token), None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """Attend causally in each sequence: query [Tq, h, d], key [Tk, g, d], value [Tk, g, e] -> [Tq, h, e]."""
    value_dim = value.size(-1)
    # The CPU's flash kernel requires equal head sizes; zero columns of the value change nothing.
    value = F.pad(value, (0, key.size(-1) - value_dim)) if value_dim < key.size(-1) else value
    q = _ToCells.apply(query, packing.queries)
    k, v = _ToCells.apply(key, packing.keys), _ToCells.apply(value, packing.keys)
    sizes = [n * length for n, length, _ in packing.buckets]
    key_sizes = [n * (length + prefix) for n, length, prefix in packing.buckets]
    parts = zip(packing.buckets, q.split(sizes), k.split(key_sizes), v.split(key_sizes), strict=True)
    out = torch.cat([_bucket_attention(*part, scale=scale) for part in parts])
    return out.index_select(0, packing.queries.cell_of_token)[..., :value_dim]


def _bucket_attention(shape: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    n, length, prefix = shape
    q = q.unflatten(0, (n, length)).transpose(1, 2)
    k, v = (x.unflatten(0, (n, prefix + length)).transpose(1, 2) for x in (k, v))
    mask = _causal_mask(length, prefix, q.dtype) if prefix else None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    return out.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=64)
def _causal_mask(length: int, prefix: int, dtype: torch.dtype) -> Tensor:
    """Return [length, prefix + length]: 0 where a query attends to a key, else minus infinity."""
    return torch.full((length, prefix + length), -torch.inf, dtype=dtype).triu(prefix + 1)
