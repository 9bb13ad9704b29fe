"""Attention of a CPU engine's decode steps, with a contiguous copy of the running sequences' keys and values.

The paged cache has a sequence's tokens in any order, and a step adds one token to each sequence. Gathering all of them
again in every layer of every step would dominate the cost of attention; so the gathered copy is kept between steps and
only the newest token is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MIN_CAPACITY = 64  # tokens
MAX_KEPT_BYTES = 2**28  # of all layers; larger copies are gathered again at every step


@dataclass
class DecodeBucket:
    """b sequences of similar length. A sequence is identified by its row in the engine's table of cache slots."""

    capacity: int  # tokens per sequence
    rows: list[int]
    lengths: list[int]  # tokens, the newest included
    batch_indices: Tensor | None  # [b] positions in the batch; None: the full batch, in its order
    slots: Tensor  # [b, longest] slots of all tokens in the paged cache
    mask: Tensor  # [b, 1, 1, longest] 0, or minus infinity past a sequence's end
    kept: Tensor  # [k] indices of the first k sequences in the previous step's bucket; the others must be gathered
    newest_slots: Tensor  # [k] slots of their newest tokens
    newest_positions: Tensor  # [k] positions of those in the flattened [b * capacity] copy
    previous: "DecodeBucket | None"  # of the previous step
    keep_copy: bool  # for the next step
    moves: tuple[Tensor, Tensor] | None = None  # target and source indices that fill the gaps of ended sequences
    layers: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # copies [b, capacity, G * D] by address of the layer's paged keys

    def read(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return one layer's keys [b, G, longest, D] and values, the newest token included. Once per step and layer."""
        address = keys.data_ptr()
        copies = self.previous.layers.pop(address, None) if self.previous else None
        all_keys = self._update_copy(keys, copies[0] if copies else None, dtype)
        if values.data_ptr() == address:  # latent attention: values are a slice of the keys
            all_values = all_keys
        else:
            all_values = self._update_copy(values, copies[1] if copies else None, dtype)
        if self.keep_copy:
            self.layers[address] = all_keys, all_values
        return self._split_heads(all_keys, keys.shape[1]), self._split_heads(all_values, keys.shape[1])

    def _update_copy(self, paged: Tensor, previous: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return [b, capacity, G * D] with all tokens, from the previous step's copy where there is one."""
        paged = paged.flatten(1)
        if previous is not None and self.moves is not None:
            copy, (targets, sources) = previous[: len(self.rows)], self.moves
            if len(targets):
                copy.index_copy_(0, targets, previous.index_select(0, sources))
        else:
            # Zeros, because a NaN past a sequence's end would survive its attention weight of 0.
            copy = torch.zeros(len(self.rows), self.capacity, paged.shape[1], dtype=dtype)
            if previous is not None:
                torch.index_select(previous, 0, self.kept, out=copy[: len(self.kept)])
        if previous is not None:
            newest = paged.index_select(0, self.newest_slots).to(dtype)
            copy.flatten(0, 1).index_copy_(0, self.newest_positions, newest)
        slots = self.slots[len(self.kept) if previous is not None else 0 :]
        if len(slots):
            copy[-len(slots) :, : slots.shape[1]] = paged.index_select(0, slots.flatten()).view(*slots.shape, -1)
        return copy

    def _split_heads(self, tokens: Tensor, groups: int) -> Tensor:
        return tokens[:, : self.slots.shape[1]].unflatten(2, (groups, -1)).transpose(1, 2)


class RunningSequences:
    """The running sequences of an engine, with state kept between decode steps."""

    def __init__(self) -> None:
        self.buckets: list[DecodeBucket] = []
        self._token_bytes: dict[int, int] = {}  # of each layer

    def clear(self) -> None:
        """Drop all copies: after a step of another kind a row may belong to another sequence."""
        self.buckets = []

    def step(self, rows: Sequence[int], lengths: Sequence[int], table: Tensor) -> None:
        """Begin a decode step of sequences of `lengths` tokens, the newest included.

        `table` [R, L]: the slots of each row's tokens in the paged cache.
        """
        by_capacity: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            by_capacity.setdefault(capacity_for(length), []).append(index)
        tokens = sum(capacity * len(indices) for capacity, indices in by_capacity.items())
        keep_copy = tokens * sum(self._token_bytes.values()) <= MAX_KEPT_BYTES
        previous = {bucket.capacity: bucket for bucket in self.buckets}
        for bucket in self.buckets:
            bucket.previous = None
        self.buckets = [
            _make_bucket(capacity, indices, rows, lengths, table, previous.get(capacity), keep_copy)
            for capacity, indices in by_capacity.items()
        ]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend with every sequence's newest token to all its tokens: query [B, H, D] -> [B, H, Dv].

        `keys` [S, G, D] and `values` [S, G, Dv]: one layer's paged cache, with the newest tokens already in it.
        """
        batch, heads, size = query.shape
        groups, value_size = keys.shape[1], values.shape[2]
        self._token_bytes[keys.data_ptr()] = 2 * keys[0].numel() * query.element_size()
        grouped = query.view(batch, groups, heads // groups, size)
        output = query.new_empty(batch, heads, value_size)
        for bucket in self.buckets:
            bucket_query = grouped if bucket.batch_indices is None else grouped[bucket.batch_indices]
            all_keys, all_values = bucket.read(keys, values, query.dtype)
            attended = scaled_dot_product_attention(
                bucket_query, all_keys, all_values, attn_mask=bucket.mask, scale=scale
            )
            attended = attended.flatten(1, 2)[..., :value_size]
            if bucket.batch_indices is None:
                return attended
            output[bucket.batch_indices] = attended
        return output


def capacity_for(length: int) -> int:
    """Return the tokens to allocate for a sequence of `length`: a multiple of a quarter of the next power of two."""
    unit = max(MIN_CAPACITY, 2 ** (length - 1).bit_length() // 4)
    return -(-length // unit) * unit


def _make_bucket(
    capacity: int,
    indices: Sequence[int],
    rows: Sequence[int],
    lengths: Sequence[int],
    table: Tensor,
    previous: DecodeBucket | None,
    keep_copy: bool,
) -> DecodeBucket:
    """Build the bucket of the sequences at `indices` of the batch, first those that `previous` has, a token shorter."""
    sequences = zip(previous.rows, previous.lengths, strict=True) if previous else ()
    previous_index = {(row, length + 1): index for index, (row, length) in enumerate(sequences)}
    order = sorted(indices, key=lambda index: (rows[index], lengths[index]) not in previous_index)
    moves = None
    if all((rows[index], lengths[index]) in previous_index for index in indices):
        order, moves = _close_gaps(order, [previous_index[rows[index], lengths[index]] for index in order])
    keys = [(rows[index], lengths[index]) for index in order]
    kept = torch.tensor([previous_index[key] for key in keys if key in previous_index], dtype=torch.long)
    bucket_lengths = torch.tensor([length for _, length in keys])
    longest = int(bucket_lengths.max())
    slots = table[[row for row, _ in keys], :longest].long()
    past_end = torch.arange(longest) >= bucket_lengths[:, None]
    last_positions = bucket_lengths[: len(kept)] - 1
    return DecodeBucket(
        capacity=capacity,
        rows=[row for row, _ in keys],
        lengths=[length for _, length in keys],
        batch_indices=None if order == list(range(len(rows))) else torch.tensor(order),
        slots=slots,
        mask=torch.zeros(past_end.shape).masked_fill_(past_end, -torch.inf)[:, None, None],
        kept=kept,
        newest_slots=slots[torch.arange(len(kept)), last_positions],
        newest_positions=torch.arange(len(kept)) * capacity + last_positions,
        previous=previous,
        keep_copy=keep_copy,
        moves=moves,
    )


def _close_gaps(indices: Sequence[int], previous: Sequence[int]) -> tuple[list[int], tuple[Tensor, Tensor]]:
    """Order sequences as in the previous bucket, the last ones moved into the gaps of ended sequences.

    `previous`: their indices in that bucket. Returns the order, and the targets and sources of the moves.
    """
    count, at = len(indices), dict(zip(previous, indices, strict=True))
    gaps = [position for position in range(count) if position not in at]
    sources = sorted(position for position in at if position >= count)
    source_of = dict(zip(gaps, sources, strict=True))
    order = [at[source_of.get(position, position)] for position in range(count)]
    return order, (torch.tensor(gaps, dtype=torch.long), torch.tensor(sources, dtype=torch.long))
