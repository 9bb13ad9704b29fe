"""Batched attention of a CPU engine over its paged KV cache; SGLang's torch_native attention loops over sequences."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mp.platform.packed_attention import Softmax

MAX_SCORES = 2**24  # largest number of attention scores in memory at a time
ALIGNMENT = 16  # numbers of keys are padded to multiples: torch sums the rest of a vector in another order


@dataclass(frozen=True)
class AttentionBatch:
    """A batch of B sequences with Q new tokens each. The layers of a forward pass share it."""

    tokens: Tensor  # [B * Q]: place of each new token among those of all sequences
    slots: Tensor  # [B * L]: cache slot of each token
    mask: Tensor  # [B, 1, R * Q, L]: 0, or minus infinity for keys to ignore; R: query heads of each key head


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
    query_heads, key_heads = heads
    starts = list(accumulate(new_tokens, initial=0))
    plan = []
    for count, batch in _batches(lengths, new_tokens, query_heads):
        tokens = torch.tensor([starts[index] for index in batch])[:, None] + torch.arange(count)
        batch_lengths = torch.tensor([lengths[index] for index in batch])
        batch_slots = slots[batch, : -(-int(batch_lengths.max()) // ALIGNMENT) * ALIGNMENT]
        positions = (batch_lengths[:, None] - count + torch.arange(count))[:, :, None]  # [B, Q, 1]
        places = torch.arange(batch_slots.shape[1])
        masked = places > positions
        if window is not None:
            masked |= places <= positions - window
        mask = torch.zeros(masked.shape).masked_fill_(masked, -torch.inf).repeat(1, query_heads // key_heads, 1)
        plan.append(AttentionBatch(tokens.flatten(), batch_slots.flatten(), mask[:, None]))
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
    groups, value_size = values.shape[1:]
    sequences, _, rows, length = batch.mask.shape
    count = len(query) // sequences
    gathered = [
        part.flatten(1).index_select(0, batch.slots).view(sequences, length, groups, -1).transpose(1, 2).to(query.dtype)
        for part in ([keys] if values.data_ptr() == keys.data_ptr() else cache)  # latent values are a slice of the keys
    ]
    if gathered[-1].shape[-1] < size:  # the kernel requires equal head sizes
        gathered[-1] = F.pad(gathered[-1], (0, size - value_size))
    # [B, G, R * Q, D]: the query heads of a key head are further queries
    grouped = query.view(sequences, count, groups, -1, size).permute(0, 2, 3, 1, 4).reshape(sequences, groups, rows, -1)
    output, normalizers = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, gathered[0], gathered[-1], attn_mask=batch.mask, scale=softmax.scale
    )
    if softmax.sinks is not None:
        sinks = softmax.sinks.float().view(groups, -1, 1).expand(-1, -1, count).reshape(groups, rows)
        output = output * (normalizers - sinks).sigmoid().to(output.dtype)[..., None]
    output = output.view(sequences, groups, -1, count, size).permute(0, 3, 1, 2, 4)
    return output.reshape(-1, heads, size)[..., :value_size]
