"""Causal attention on a CPU for packed sequences, latent-attention head sizes and context parallelism.

A packed batch is a row of tokens [T, ...]. Sequences of similar length are laid side by side in buckets
[n, L], padded on the right to the bucket's longest: under a causal mask no real token sees the padding,
so no mask tensor exists. A place in a bucket is a cell; index tensors lead from tokens to cells and back.

A sequence may see keys before its own. Sequences that see equally many are laid side by side, with one mask.

With context parallelism a sequence is cut into 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r.
Keys and values are gathered from all ranks; each query is put in its cell of the whole sequence, and the
cells of other ranks' queries are computed but not read.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class CellIndex:
    """Where tokens go: `token_of_cell` [cells] (any token for padding), `cell_of_token` [tokens]."""

    token_of_cell: Tensor
    cell_of_token: Tensor


@dataclass(frozen=True)
class Packing:
    """Buckets as (sequences, length, keys before), and the ways of this rank's queries and of all keys into them."""

    buckets: tuple[tuple[int, int, int], ...]
    queries: CellIndex
    keys: CellIndex


def bucket_lengths(lengths: tuple[int, ...], before: tuple[int, ...] = ()) -> list[list[int]]:
    """Group sequence numbers by similar length, longest first; a bucket wastes at most a tenth of each row.

    `before`: keys that each sees before its own, equally many in one bucket.
    """
    before = before or (0,) * len(lengths)
    buckets: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (before[i], -lengths[i])):
        longest = buckets[-1][0] if buckets else i
        if buckets and before[i] == before[longest] and 10 * lengths[i] >= 9 * lengths[longest]:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets


def zigzag_positions(length: int, cp: int, rank: int) -> Tensor:
    """Positions, in a sequence of `length` tokens, of those that context-parallel rank `rank` holds, in order."""
    if cp == 1:
        return torch.arange(length)
    first, last = (torch.arange(length).chunk(2 * cp)[i] for i in (rank, 2 * cp - 1 - rank))
    return torch.cat([first, last])


@lru_cache(maxsize=64)
def plan_packing(lengths: tuple[int, ...], cp: int = 1, rank: int = 0, before: tuple[int, ...] = ()) -> Packing:
    """The packing of sequences of these whole lengths for one of `cp` context-parallel ranks.

    `before`, without context parallelism: how many more keys than queries each has, before its own.
    """
    before = before or (0,) * len(lengths)
    buckets = bucket_lengths(lengths, before)
    shapes = tuple((len(bucket), lengths[bucket[0]], before[bucket[0]]) for bucket in buckets)
    key_lengths = tuple(n + more for n, more in zip(lengths, before, strict=True))
    first, cells = _first_cells(buckets, lengths)
    if any(before):
        first_key, key_cells = _first_cells(buckets, key_lengths)
        queries = _way(_cells(lengths, first, 1, 0), cells)
        return Packing(shapes, queries, _way(_cells(key_lengths, first_key, 1, 0), key_cells))
    keys = _way(torch.cat([_cells(lengths, first, cp, r) for r in range(cp)]), cells)
    return Packing(shapes, keys if cp == 1 else _way(_cells(lengths, first, cp, rank), cells), keys)


def _first_cells(buckets: list[list[int]], lengths: tuple[int, ...]) -> tuple[list[int], int]:
    """The cell of each sequence's first token, and the number of cells: rows are as long as their bucket's longest."""
    first, cells = [0] * len(lengths), 0
    for bucket in buckets:
        longest = lengths[bucket[0]]
        for row, i in enumerate(bucket):
            first[i] = cells + row * longest
        cells += len(bucket) * longest
    return first, cells


def _cells(lengths: tuple[int, ...], first: list[int], cp: int, rank: int) -> Tensor:
    """The cells of the tokens that one context-parallel rank holds, in its order."""
    return torch.cat([zigzag_positions(n, cp, rank) + c for n, c in zip(lengths, first, strict=True)])


def _way(cell_of_token: Tensor, cells: int) -> CellIndex:
    token_of_cell = torch.zeros(cells, dtype=torch.long)
    token_of_cell[cell_of_token] = torch.arange(len(cell_of_token))
    return CellIndex(token_of_cell, cell_of_token)


class _ToCells(torch.autograd.Function):
    """tokens [T, ...] -> cells [C, ...]. Cells without a token pass no gradient back: attention gives them 0."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, way: CellIndex) -> Tensor:
        ctx.way = way
        return tokens.index_select(0, way.token_of_cell)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.way.cell_of_token), None


class _ToTokens(torch.autograd.Function):
    """cells [C, ...] -> tokens [T, ...]; cells that hold no token get gradient 0."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, way: CellIndex) -> Tensor:
        ctx.way = way
        return cells.index_select(0, way.cell_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cells = grad.new_zeros(len(ctx.way.token_of_cell), *grad.shape[1:])
        return cells.index_copy_(0, ctx.way.cell_of_token, grad), None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention inside each sequence: query [Tq, h, d], key [Tk, g, d], value [Tk, g, e] -> [Tq, h, e]."""
    value_dim = value.size(-1)
    # The CPU's flash kernel wants one head size for all three; zero columns of the value change nothing.
    value = F.pad(value, (0, key.size(-1) - value_dim)) if value_dim < key.size(-1) else value
    q, k, v = (
        _ToCells.apply(x, way) for x, way in ((query, packing.queries), (key, packing.keys), (value, packing.keys))
    )
    sizes = [n * length for n, length, _ in packing.buckets]
    key_sizes = [n * (length + before) for n, length, before in packing.buckets]
    parts = zip(packing.buckets, q.split(sizes), k.split(key_sizes), v.split(key_sizes), strict=True)
    out = torch.cat([_bucket_attention(*part, scale=scale) for part in parts])
    return _ToTokens.apply(out, packing.queries)[..., :value_dim]


def _bucket_attention(shape: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    n, length, before = shape
    q = q.unflatten(0, (n, length)).transpose(1, 2)
    k, v = (x.unflatten(0, (n, before + length)).transpose(1, 2) for x in (k, v))
    mask = _sees(length, before, q.dtype) if before else None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    return out.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=64)
def _sees(length: int, before: int, dtype: torch.dtype) -> Tensor:
    """[length, before + length]: 0 where a query sees a key, else minus infinity."""
    return torch.full((length, before + length), -torch.inf, dtype=dtype).triu(before + 1)
