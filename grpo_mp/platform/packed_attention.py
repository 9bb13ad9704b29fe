"""Causal attention on a CPU for packed sequences, latent attention and context parallelism.

A packed batch is a row of tokens [T, ...]. Sequences of similar length are batched in buckets [n, L], right-padded to
the longest sequence L of the bucket. With a causal mask no real token attends to padding, so no mask tensor is needed.
A position in a bucket is called a cell; index tensors map tokens to cells and back.

A sequence may also attend to a prefix, keys before its first token; with a prefix or a sliding window a bucket has one
mask. With context parallelism of size cp, a sequence is cut into 2 * cp chunks, and rank r has chunks r and
2 * cp - 1 - r. Keys and values are gathered from all ranks; the cells of other ranks' queries are computed but not
read.
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
    """Index tensors `token_of_cell` [cells], with an arbitrary token for padding, and `cell_of_token` [tokens]."""

    token_of_cell: Tensor
    cell_of_token: Tensor


@dataclass(frozen=True)
class Packing:
    """Buckets as (sequences, length, prefix length), and the cell indices of this rank's queries and of all keys."""

    buckets: tuple[tuple[int, int, int], ...]
    queries: CellIndex
    keys: CellIndex


def bucket_by_length(lengths: tuple[int, ...], prefixes: tuple[int, ...] = ()) -> list[list[int]]:
    """Return buckets of sequence indices with equal prefix length and similar length, the longest first.

    At most a tenth of each row is padding.
    """
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
    """Return the positions of the tokens of a sequence that context-parallel rank `rank` of `cp` has."""
    if cp == 1:
        return torch.arange(length)
    first, last = (torch.arange(length).chunk(2 * cp)[i] for i in (rank, 2 * cp - 1 - rank))
    return torch.cat([first, last])


@lru_cache(maxsize=64)
def plan_packing(lengths: tuple[int, ...], cp: int = 1, rank: int = 0, prefixes: tuple[int, ...] = ()) -> Packing:
    """Return the packing of sequences for context-parallel rank `rank` of `cp`.

    `lengths`: tokens of each sequence over all ranks; `prefixes`: length of each sequence's prefix, only with cp = 1.
    """
    prefixes = prefixes or (0,) * len(lengths)
    buckets = bucket_by_length(lengths, prefixes)
    shapes = tuple((len(bucket), lengths[bucket[0]], prefixes[bucket[0]]) for bucket in buckets)
    key_lengths = tuple(n + prefix for n, prefix in zip(lengths, prefixes, strict=True))
    queries = _cell_index(buckets, lengths, cp, [rank])
    same = cp == 1 and not any(prefixes)
    return Packing(shapes, queries, queries if same else _cell_index(buckets, key_lengths, cp, range(cp)))


def _cell_index(buckets: list[list[int]], lengths: tuple[int, ...], cp: int, ranks: Iterable[int]) -> CellIndex:
    first_cell = [0] * len(lengths)
    cells = 0
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
    """Gathers tokens [T, ...] into cells [C, ...].

    Padding cells have gradient 0, so backward only gathers. index_select's own backward would scatter-add all cells.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: CellIndex) -> Tensor:
        ctx.index = index
        return tokens.index_select(0, index.token_of_cell)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.index.cell_of_token), None


def to_cells(tokens: Tensor, index: CellIndex) -> Tensor:
    """Gather tokens [T, ...] into cells [C, ...]. Padding cells hold an arbitrary token and pass no gradient."""
    cells: Tensor = _ToCells.apply(tokens, index)
    return cells


@dataclass(frozen=True)
class Softmax:
    """How scores become weights.

    `scale`: factor of the scores; `window`: number of keys that a query attends to, itself the last; None: all;
    `sinks` [h]: logits beside those of the keys, whose weight goes to no value; None: without sinks.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, softmax: Softmax) -> Tensor:
    """Return causal attention [Tq, h, e] within each sequence: query [Tq, h, d], key [Tk, g, d], value [Tk, g, e]."""
    value_dim = value.size(-1)
    # torch's flash kernel for CPUs requires equal head sizes, so values are padded with zeros.
    value = F.pad(value, (0, key.size(-1) - value_dim)) if value_dim < key.size(-1) else value
    q = _ToCells.apply(query, packing.queries)
    k = _ToCells.apply(key, packing.keys)
    v = _ToCells.apply(value, packing.keys)
    sizes = [n * length for n, length, _ in packing.buckets]
    key_sizes = [n * (length + prefix) for n, length, prefix in packing.buckets]
    parts = zip(packing.buckets, q.split(sizes), k.split(key_sizes), v.split(key_sizes), strict=True)
    out = torch.cat([_bucket_attention(*part, softmax=softmax) for part in parts])
    return out.index_select(0, packing.queries.cell_of_token)[..., :value_dim]


def _bucket_attention(shape: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    n, length, prefix = shape
    q = q.unflatten(0, (n, length)).transpose(1, 2)
    k, v = (x.unflatten(0, (n, prefix + length)).transpose(1, 2) for x in (k, v))
    window = softmax.window if softmax.window and softmax.window < prefix + length else None
    has_mask = bool(prefix or window or softmax.sinks is not None)
    mask = _causal_mask(length, prefix, window, q.dtype) if has_mask else None
    if softmax.sinks is not None:
        return _attention_with_sinks(q, k, v, mask, softmax).transpose(1, 2).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax.scale, enable_gqa=q.size(1) != k.size(1)
    )
    return out.transpose(1, 2).flatten(0, 1)


def _attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """Return attention [n, h, length, d]; the sinks are the logits of a further key without a value."""
    assert mask is not None
    assert softmax.sinks is not None
    grouped = q.unflatten(1, (k.size(1), -1))  # [n, g, h / g, length, d]
    scores = (grouped @ k.unsqueeze(2).mT * softmax.scale + mask).flatten(1, 2)
    sinks = softmax.sinks.to(scores.dtype)[:, None, None].expand(len(scores), -1, scores.size(2), 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype)
    return (weights.unflatten(1, (k.size(1), -1)) @ v.unsqueeze(2)).flatten(1, 2)


@lru_cache(maxsize=64)
def _causal_mask(length: int, prefix: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the mask [length, prefix + length]: 0 where a query attends to a key, else minus infinity."""
    mask = torch.full((length, prefix + length), -torch.inf, dtype=dtype)
    after = mask.triu(prefix + 1)
    return after if window is None else after + mask.tril(prefix - window)
