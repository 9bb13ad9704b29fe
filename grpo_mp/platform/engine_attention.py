"""Batched attention of a CPU engine over its paged KV cache; SGLang's torch_native attention loops over sequences."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from grpo_mp.platform.packed_attention import Softmax

MAX_SCORES = 2**24  # largest number of attention scores in memory at a time
ALIGNMENT = 16  # numbers of keys are padded to multiples: torch sums the rest of a vector in another order


def paged_attention(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    lengths: Sequence[int],
    new_tokens: Sequence[int],
    softmax: Softmax,
) -> Tensor:
    """Return causal attention of the new tokens of B sequences over all their tokens, [T, H, Dv].

    `query` [T, H, D]: new tokens of all sequences, concatenated; `cache`: keys [S, G, D] and values [S, G, Dv] of S
    slots, where G divides H; `slots` [B, L]: cache slot of each token (beyond a sequence's length any valid slot);
    `lengths`: tokens of each sequence; `new_tokens`: how many of them, at the end, are new.
    """
    keys, values = cache
    output = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
    starts = list(accumulate(new_tokens, initial=0))
    for count, batch in _batches(lengths, new_tokens, query.shape[1]):
        rows = torch.tensor([starts[index] for index in batch])[:, None] + torch.arange(count)
        batch_lengths = torch.tensor([lengths[index] for index in batch])
        batch_slots = slots[batch, : -(-int(batch_lengths.max()) // ALIGNMENT) * ALIGNMENT]
        output[rows] = _attend(
            query[rows], keys, values=values, slots=batch_slots, lengths=batch_lengths, softmax=softmax
        )
    return output


def _batches(lengths: Sequence[int], new_tokens: Sequence[int], heads: int) -> Iterator[tuple[int, list[int]]]:
    """Yield batches of sequences with equal numbers of new tokens and similar lengths: (new tokens, indices)."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        groups[new_tokens[index]].append(index)
    for count, group in groups.items():
        batch: list[int] = []
        for index in group:
            scores = (len(batch) + 1) * max(1, count) * heads * lengths[index]
            shortest = lengths[batch[0]] if batch else 0
            max_length = shortest + shortest // 4 + 32  # up to here padding costs less than one more batch
            if batch and (scores > MAX_SCORES or lengths[index] > max_length):
                yield count, batch
                batch = []
            batch.append(index)
        yield count, batch


def _attend(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, softmax: Softmax) -> Tensor:
    """Return causal attention [B, Q, H, Dv] of `query` [B, Q, H, D] over the tokens at `slots` [B, L].

    `lengths` [B]: tokens of each sequence.
    """
    batch, count, heads, size = query.shape
    groups = keys.shape[1]
    # The tokens of each head become contiguous: [B, G, L, D] and [B, G, L, Dv].
    rows = (slots[:, None] * groups + torch.arange(groups)[None, :, None]).flatten()
    shape = (batch, groups, slots.shape[1], -1)
    gathered_keys = keys.view(-1, size).index_select(0, rows).view(shape)
    if values.data_ptr() == keys.data_ptr():  # latent attention: values are a slice of the keys
        gathered_values = gathered_keys[..., : values.shape[2]]
    else:
        gathered_values = values.view(-1, values.shape[2]).index_select(0, rows).view(shape)
    positions = lengths[:, None] - count + torch.arange(count)  # [B, Q]
    places = torch.arange(slots.shape[1])
    mask = places > positions[:, :, None]
    if softmax.window is not None:
        mask |= places <= positions[:, :, None] - softmax.window
    mask = mask[:, None, None]  # [B, 1, 1, Q, L]
    grouped = query.view(batch, count, groups, heads // groups, size).permute(0, 2, 3, 1, 4)  # [B, G, H/G, Q, D]
    scores = grouped.reshape(batch, groups, -1, size) @ gathered_keys.to(query.dtype).transpose(-1, -2)
    scores = scores.float().mul_(softmax.scale).view(*grouped.shape[:-1], -1)
    scores.masked_fill_(mask, -torch.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(query.dtype)
    else:
        weights = scores.softmax(-1).to(query.dtype)
    output = weights.view(batch, groups, -1, weights.shape[-1]) @ gathered_values.to(query.dtype)
    return output.view(*grouped.shape[:-1], -1).permute(0, 3, 1, 2, 4).reshape(batch, count, heads, -1)
