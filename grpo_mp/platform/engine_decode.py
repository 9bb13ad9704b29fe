"""Attention of a CPU engine's decode steps: keys and values of the running sequences stay side by side.

The paged cache has a sequence's tokens in any order, and a step adds one token to each sequence. To gather all of them
anew in every layer of every step is most of what attention costs there; so what was gathered stays, and the newest
token is added to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SMALLEST_ROOM = 64  # tokens
KEPT_LIMIT_BYTES = 2**28  # of all layers; what needs more is gathered at every step


@dataclass
class Bucket:
    """b sequences of similar length. A sequence's name is its row in the engine's table of cache slots."""

    room: int  # tokens for which there is space
    rows: list[int]
    lengths: list[int]  # tokens, the newest included
    members: Tensor | None  # [b] places in the batch; None: all of it, in its order
    slots: Tensor  # [b, longest] places of all tokens in the paged cache
    hidden: Tensor  # [b, 1, 1, longest] 0, or minus infinity past a sequence's end
    stayed: Tensor  # [k] places of the first k sequences in the bucket before; the others must be gathered
    newest: Tensor  # [k] of those, the slot of the newest token
    ends: Tensor  # [k] and its place among all places of the bucket
    before: "Bucket | None"
    keeps: bool  # for the next step
    moves: tuple[Tensor, Tensor] | None = None  # into which places, of sequences that ended, which others move
    layers: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # [b, room, G * D] by the paged keys' address

    def read(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One layer's keys [b, G, longest, D] and values, the newest token among them. Once a step for each layer."""
        name = keys.data_ptr()
        held = self.before.layers.pop(name, None) if self.before else None
        all_keys = self._side_by_side(keys, held[0] if held else None, dtype)
        if values.data_ptr() == name:  # latent attention keeps the values as a part of the keys
            all_values = all_keys
        else:
            all_values = self._side_by_side(values, held[1] if held else None, dtype)
        if self.keeps:
            self.layers[name] = all_keys, all_values
        return self._by_head(all_keys, keys.shape[1]), self._by_head(all_values, keys.shape[1])

    def _side_by_side(self, paged: Tensor, held: Tensor | None, dtype: torch.dtype) -> Tensor:
        paged = paged.flatten(1)
        if held is not None and self.moves is not None:
            found, (holes, fill) = held[: len(self.rows)], self.moves
            if len(holes):
                found.index_copy_(0, holes, held.index_select(0, fill))
        else:
            # Past a sequence's end there must be a number: a weight of 0 does not remove what is none.
            found = torch.zeros(len(self.rows), self.room, paged.shape[1], dtype=dtype)
            if held is not None:
                torch.index_select(held, 0, self.stayed, out=found[: len(self.stayed)])
        if held is not None:
            found.flatten(0, 1).index_copy_(0, self.ends, paged.index_select(0, self.newest).to(dtype))
        gathered = self.slots[len(self.stayed) if held is not None else 0 :]
        if len(gathered):
            tokens = paged.index_select(0, gathered.flatten()).view(*gathered.shape, -1)
            found[-len(gathered) :, : gathered.shape[1]] = tokens
        return found

    def _by_head(self, tokens: Tensor, groups: int) -> Tensor:
        return tokens[:, : self.slots.shape[1]].unflatten(2, (groups, -1)).transpose(1, 2)


class RunningSequences:
    """The running sequences of an engine, from one decode step to the next."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._token_bytes: dict[int, int] = {}  # of each layer

    def forget(self) -> None:
        """Keep nothing: after a step of another kind a row may name another sequence."""
        self.buckets = []

    def step(self, rows: Sequence[int], lengths: Sequence[int], table: Tensor) -> None:
        """Begin a decode step of sequences of `lengths` tokens, the newest included.

        `table` [R, L] says where in the paged cache the tokens of each row's sequence are.
        """
        by_room: dict[int, list[int]] = {}
        for member, length in enumerate(lengths):
            by_room.setdefault(room_for(length), []).append(member)
        tokens = sum(room * len(members) for room, members in by_room.items())
        keeps = tokens * sum(self._token_bytes.values()) <= KEPT_LIMIT_BYTES
        before = {bucket.room: bucket for bucket in self.buckets}
        for bucket in self.buckets:
            bucket.before = None
        self.buckets = [
            _bucket(room, members, rows, lengths, table, before.get(room), keeps) for room, members in by_room.items()
        ]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention of every sequence's newest token over all its tokens: query [B, H, D] -> [B, H, Dv].

        `keys` [S, G, D] and `values` [S, G, Dv] are one layer's paged cache, which has the newest tokens already.
        """
        batch, heads, size = query.shape
        groups, value_size = keys.shape[1], values.shape[2]
        self._token_bytes[keys.data_ptr()] = 2 * keys[0].numel() * query.element_size()
        grouped = query.view(batch, groups, heads // groups, size)
        output = query.new_empty(batch, heads, value_size)
        for bucket in self.buckets:
            ours = grouped if bucket.members is None else grouped[bucket.members]
            seen_keys, seen_values = bucket.read(keys, values, query.dtype)
            found = scaled_dot_product_attention(ours, seen_keys, seen_values, attn_mask=bucket.hidden, scale=scale)
            found = found.flatten(1, 2)[..., :value_size]
            if bucket.members is None:
                return found
            output[bucket.members] = found
        return output


def room_for(length: int) -> int:
    """Tokens for which a sequence of `length` is given space: the next half of a power of two."""
    unit = max(SMALLEST_ROOM, 2 ** (length - 1).bit_length() // 4)
    return -(-length // unit) * unit


def _bucket(
    room: int,
    members: Sequence[int],
    rows: Sequence[int],
    lengths: Sequence[int],
    table: Tensor,
    before: Bucket | None,
    keeps: bool,
) -> Bucket:
    """Sequences that the bucket `before` has, a token shorter, come first."""
    held = zip(before.rows, before.lengths, strict=True) if before else ()
    places = {(row, length + 1): place for place, (row, length) in enumerate(held)}
    order = sorted(members, key=lambda member: (rows[member], lengths[member]) not in places)
    moves = None
    if all((rows[member], lengths[member]) in places for member in members):
        order, moves = _close_gaps(order, [places[rows[member], lengths[member]] for member in order])
    names = [(rows[member], lengths[member]) for member in order]
    stayed = torch.tensor([places[name] for name in names if name in places], dtype=torch.long)
    total = torch.tensor([length for _, length in names])
    longest = int(total.max())
    slots = table[[row for row, _ in names], :longest].long()
    past_end = torch.arange(longest) >= total[:, None]
    return Bucket(
        room=room,
        rows=[row for row, _ in names],
        lengths=[length for _, length in names],
        members=None if order == list(range(len(rows))) else torch.tensor(order),
        slots=slots,
        hidden=torch.zeros(past_end.shape).masked_fill_(past_end, -torch.inf)[:, None, None],
        stayed=stayed,
        newest=slots[torch.arange(len(stayed)), total[: len(stayed)] - 1],
        ends=torch.arange(len(stayed)) * room + total[: len(stayed)] - 1,
        before=before,
        keeps=keeps,
        moves=moves,
    )


def _close_gaps(members: Sequence[int], places: Sequence[int]) -> tuple[list[int], tuple[Tensor, Tensor]]:
    """Order members by their places before, the last of them moved to the places of those that ended.

    Returns the order, and the places to fill with the places that move there.
    """
    count, at = len(members), dict(zip(places, members, strict=True))
    holes = [place for place in range(count) if place not in at]
    fill = sorted(place for place in at if place >= count)
    source = dict(zip(holes, fill, strict=True))
    order = [at[source.get(place, place)] for place in range(count)]
    return order, (torch.tensor(holes, dtype=torch.long), torch.tensor(fill, dtype=torch.long))
