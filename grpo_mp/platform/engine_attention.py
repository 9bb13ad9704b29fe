"""Batched attention of a CPU engine over its paged KV cache; SGLang's torch_native attention loops over sequences."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from grpo_mp.platform.packed_attention import Softmax

MAX_SCORES = 2**24  # largest number of attention scores in memory at a time
ALIGNMENT = 16  # numbers of keys are padded to multiples: torch sums the rest of a vector in another order


@dataclass(frozen=True)
class AttentionBatch:
    """A batch of B sequences with Q new tokens each. The layers of a forward pass share it."""

    tokens: Tensor  # [B * Q]: place of each new token among those of all sequences
    cache_rows: Tensor  # [B * G * L]: row of each head and token in a cache [S * G, D]; the tokens of a head adjacent
    masked: Tensor  # [B, 1, 1, Q, L]: True where a new token must not attend to a key


def shared_plan(
    plans: dict[tuple[int, int, int | None], list[AttentionBatch]],
    layer: tuple[int, int, int | None],
    slots: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
) -> list[AttentionBatch]:
    """Return the attention batches of a forward pass, which layers with the same heads and window share by `plans`.

    `layer`: number of query heads, number of key heads, window; for the others see `plan_attention`.
    """
    if layer not in plans:
        query_heads, key_heads, window = layer
        plans[layer] = plan_attention(slots, lengths.tolist(), new_lengths.tolist(), (query_heads, key_heads), window)
    return plans[layer]


def plan_attention(
    slots: Tensor, lengths: Sequence[int], new_tokens: Sequence[int], heads: tuple[int, int], window: int | None
) -> list[AttentionBatch]:
    """Group sequences into the batches of `paged_attention`.

    `slots` [sequences, tokens]: cache slot of each token (beyond a sequence's length any valid slot); `lengths`: tokens
    of each sequence; `new_tokens`: how many of them, at the end, are new; `heads`: of queries and of keys; `window`:
    see Softmax.
    """
    query_heads, groups = heads
    starts = list(accumulate(new_tokens, initial=0))
    plan = []
    for count, batch in _batches(lengths, new_tokens, query_heads):
        tokens = torch.tensor([starts[index] for index in batch])[:, None] + torch.arange(count)
        batch_lengths = torch.tensor([lengths[index] for index in batch])
        batch_slots = slots[batch, : -(-int(batch_lengths.max()) // ALIGNMENT) * ALIGNMENT]
        cache_rows = batch_slots[:, None] * groups + torch.arange(groups)[None, :, None]
        positions = (batch_lengths[:, None] - count + torch.arange(count))[:, :, None]  # [B, Q, 1]
        places = torch.arange(batch_slots.shape[1])
        masked = places > positions
        if window is not None:
            masked |= places <= positions - window
        plan.append(AttentionBatch(tokens.flatten(), cache_rows.flatten(), masked[:, None, None]))
    return plan


def paged_attention(
    query: Tensor, cache: tuple[Tensor, Tensor], plan: Sequence[AttentionBatch], softmax: Softmax
) -> Tensor:
    """Return causal attention of the new tokens of all sequences over all their tokens, [T, H, Dv].

    `query` [T, H, D]: new tokens of all sequences, concatenated; `cache`: keys [S, G, D] and values [S, G, Dv] of S
    slots, where G divides H; `plan`: see `plan_attention`, of the same window as `softmax`.
    """
    output = query.new_empty(*query.shape[:2], cache[1].shape[2])
    for batch in plan:
        output.index_copy_(0, batch.tokens, _attend(query.index_select(0, batch.tokens), cache, batch, softmax))
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


def _attend(query: Tensor, cache: tuple[Tensor, Tensor], batch: AttentionBatch, softmax: Softmax) -> Tensor:
    """Return causal attention [B * Q, H, Dv] of `query` [B * Q, H, D]."""
    keys, values = cache
    heads, size = query.shape[1:]
    groups = keys.shape[1]
    sequences, _, _, count, length = batch.masked.shape
    shape = (sequences, groups, length, -1)
    gathered_keys = keys.view(-1, size).index_select(0, batch.cache_rows).view(shape)
    if values.data_ptr() == keys.data_ptr():  # latent attention: values are a slice of the keys
        gathered_values = gathered_keys[..., : values.shape[2]]
    else:
        gathered_values = values.view(-1, values.shape[2]).index_select(0, batch.cache_rows).view(shape)
    # [B, G, H/G, Q, D]
    grouped = query.view(sequences, count, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(sequences, groups, -1, size) @ gathered_keys.to(query.dtype).transpose(-1, -2)
    scores = scores.float().mul_(softmax.scale).view(*grouped.shape[:-1], -1)
    scores.masked_fill_(batch.masked, -torch.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(query.dtype)
    else:
        weights = scores.softmax(-1).to(query.dtype)
    output = weights.view(sequences, groups, -1, length) @ gathered_values.to(query.dtype)
    return output.view(*grouped.shape[:-1], -1).permute(0, 3, 1, 2, 4).reshape(sequences * count, heads, -1)
