"""Attention of a CPU engine over its paged cache, many sequences at a time.

SGLang's plain torch attention takes one sequence after the other, and for a sequence whose prefix is cached it
computes the prefix's rows again. A tiny model spends most of its time there.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

SCORES_LIMIT = 2**24  # attention scores that exist at one time


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: Sequence[int],
    new_tokens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of each sequence's last `new_tokens` over all its `lengths` tokens: [T, H, Dv].

    `query` [T, H, D] holds the new tokens of all sequences end to end; `keys` [S, G, D] and `values` [S, G, Dv] are the
    cache, with G dividing H; `slots` [B, L] says where in the cache each token of a sequence is (beyond its length:
    any valid slot).
    """
    output = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
    starts = [0]
    for count in new_tokens:
        starts.append(starts[-1] + count)
    for count, members in _batches(lengths, new_tokens, query.shape[1]):
        rows = torch.tensor([starts[member] for member in members])[:, None] + torch.arange(count)
        total = torch.tensor([lengths[member] for member in members])
        places = slots[members, : int(total.max())]
        output[rows] = _attend(query[rows], keys, values, places, total, scale)
    return output


def _batches(lengths: Sequence[int], new_tokens: Sequence[int], heads: int) -> Iterator[tuple[int, list[int]]]:
    """Sequences with equally many new tokens and similar lengths, as many together as the limit of scores allows."""
    groups: dict[int, list[int]] = defaultdict(list)
    for member in sorted(range(len(lengths)), key=lengths.__getitem__):
        groups[new_tokens[member]].append(member)
    for count, members in groups.items():
        batch: list[int] = []
        for member in members:
            scores = (len(batch) + 1) * max(1, count) * heads * lengths[member]
            if batch and (scores > SCORES_LIMIT or lengths[member] > _longest_beside(lengths[batch[0]])):
                yield count, batch
                batch = []
            batch.append(member)
        yield count, batch


def _longest_beside(shortest: int) -> int:
    return shortest + shortest // 4 + 32  # padding costs less than another round of small operations


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    total: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`query` [B, Q, H, D], `slots` [B, L], `total` [B] tokens of each sequence: [B, Q, H, Dv]."""
    batch, count, heads, size = query.shape
    groups = keys.shape[1]
    last_seen = total[:, None] - count + torch.arange(count)  # [B, Q]
    hidden = (torch.arange(slots.shape[1]) > last_seen[:, :, None])[:, None, None]  # [B, 1, 1, Q, L]
    seen_keys, seen_values = _gather(keys, values, slots)
    grouped = query.view(batch, count, groups, heads // groups, size).permute(0, 2, 3, 1, 4)  # [B, G, H/G, Q, D]
    scores = grouped.reshape(batch, groups, -1, size) @ seen_keys.to(query.dtype).transpose(-1, -2)
    scores = scores.float().mul_(scale).view(batch, groups, heads // groups, count, -1)
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).to(query.dtype)
    mixed = weights.view(batch, groups, -1, weights.shape[-1]) @ seen_values.to(query.dtype)
    return mixed.view(batch, groups, heads // groups, count, -1).permute(0, 3, 1, 2, 4).reshape(batch, count, heads, -1)


def _gather(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache at `slots` [B, L] with the tokens of one head side by side: two of [B, G, L, D]."""
    groups = keys.shape[1]
    places = (slots[:, None] * groups + torch.arange(groups)[None, :, None]).flatten()
    shape = (slots.shape[0], groups, slots.shape[1], -1)
    seen_keys = keys.view(-1, keys.shape[2]).index_select(0, places).view(shape)
    if values.data_ptr() == keys.data_ptr():  # latent attention keeps the values as a part of the keys
        return seen_keys, seen_keys[..., : values.shape[2]]
    return seen_keys, values.view(-1, values.shape[2]).index_select(0, places).view(shape)
