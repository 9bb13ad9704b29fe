"""Plan of a weight sync: which rank sends which shards to which rank in which round, and which ranks load them.

Parameters are sent in groups. A group is one expert, one parameter, or the parameters of a layer that an engine fuses
within one request (the two down-projections of latent attention). On each node that needs a group, one rank, the
receiver, gets the shards and joins ("stages") them; the node's other readers load the receiver's copy. Thus an expert
is sent only to nodes that keep it, and other weights cross the network once for each node. If several ranks of an
engine divide an expert, each rank gets its slice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

from grpo_mp.models.mapping import Param
from grpo_mp.rollout.engine_layout import EngineParallelism

# Maximum number of rounds in a rank's memory: loaded by the engine, received, joined or sent, packed to be sent next.
ROUNDS_IN_MEMORY = 4
SLICED_GROUPS_PER_ROUND = 8
GOLDEN_RATIO = 0.618034
SEND_SLACK = 1.25  # limit of the bytes that a rank sends in a round, as a multiple of an even share

Share = tuple[int, tuple[int, ...]]  # the staging rank, and the other ranks that load the same tensors
Use = tuple[str, int]  # kind of memory use ("sends", "receives" or "loads"), rank
Holders = Mapping[str, Mapping[int, Sequence[int]]]  # parameter -> tensor-parallel part -> ranks that hold it


class Slice(NamedTuple):
    """One of `total` equal slices of an expert, along the dimension that tensor parallelism divides."""

    number: int
    total: int

    def overlaps(self, parts: int) -> range:
        """Return the indices of the tensor-parallel parts that the slice overlaps. `parts`: number of parts."""
        return range(self.number * parts // self.total, -(-(self.number + 1) * parts // self.total))


WHOLE = Slice(0, 1)


class Shard(NamedTuple):
    """One tensor-parallel part of a parameter, or the overlap of the part with a slice."""

    name: str
    part: int
    slice: Slice = WHOLE


class Piece(NamedTuple):
    """A slice of a parameter's Hugging Face tensors, as an engine loads it."""

    name: str
    slice: Slice = WHOLE


Readers = Callable[["ParamGroup"], Mapping[Slice, Sequence[int]]]  # returns the ranks that load each slice of a group


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that an engine must load in one request."""

    names: tuple[str, ...]
    expert: int | None  # index of a routed expert; None: other parameters
    divided: tuple[int, ...] = ()  # of an expert: sizes of the dimensions that tensor parallelism divides


@dataclass(frozen=True)
class ShardSizes:
    """Functions that return the size of a sent shard and of a staged piece [bytes]."""

    sent: Callable[[Shard], int]
    staged: Callable[[Piece], int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of a parameter group, or of a slice of the group, to one node; large jobs have tens of thousands."""

    names: tuple[str, ...]
    sources: tuple[tuple[tuple[int, int], ...], ...]  # for each name: (part, rank that sends the part) of each part
    receiver: int
    readers: tuple[int, ...]  # ranks of the receiver's node that load the group, including the receiver
    slice: Slice = WHOLE

    def shards(self) -> Iterator[tuple[int, Shard]]:
        """Yield (source rank, shard) for each shard; the source may be the receiver."""
        for name, sources in zip(self.names, self.sources, strict=True):
            for part, source in sources:
                yield source, Shard(name, part, self.slice)

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(Piece(name, self.slice) for name in self.names)


@dataclass
class RankRound:
    """One rank's work in one round. The order of shards is their order in the messages."""

    sends: dict[int, list[Shard]] = field(default_factory=dict)  # by target rank
    receives: dict[int, list[Shard]] = field(default_factory=dict)  # by source rank, without this rank
    own: list[Shard] = field(default_factory=list)  # shards that this rank both holds and stages
    staged: list[Piece] = field(default_factory=list)  # pieces that this rank joins from shards
    shares: dict[Share, list[Piece]] = field(default_factory=dict)  # pieces to exchange within the node
    loads: dict[int, list[Piece]] = field(default_factory=dict)  # pieces of its engine process, by staging rank


@dataclass(frozen=True)
class SyncPlan:
    """Rounds of transfers. The memory of a round is freed after the engines have loaded it."""

    rounds: tuple[tuple[Transfer, ...], ...]

    def of_rank(self, rank: int) -> tuple[RankRound, ...]:
        """Return one rank's work in every round."""
        return tuple(_rank_round(transfers, rank) for transfers in self.rounds)


def plan_sync(
    groups: Sequence[ParamGroup],
    holders: Holders,
    readers: Readers,
    ranks_per_node: int,
    sizes: ShardSizes,
    round_bytes: int,
) -> SyncPlan:
    """Plan the transfers of each group from its `holders` to its `readers`.

    A round has at most `round_bytes` on each rank, unless a single group is larger.
    """
    most_bytes = round_bytes // SLICED_GROUPS_PER_ROUND
    merged = _merge_sliced(groups, holders, readers=readers, sizes=sizes, most_bytes=most_bytes)
    transfers = _transfers(merged, holders, readers=readers, ranks_per_node=ranks_per_node, sizes=sizes)
    return SyncPlan(_fill_rounds(transfers, sizes, round_bytes))


def engine_readers(host_ranks: Sequence[int], parallelism: EngineParallelism, alignment: int = 1) -> Readers:
    """Return the function that maps a group to the ranks that load each slice of the group.

    An expert is loaded by the ranks that keep it, other parameters by all engine ranks. Ranks that divide an expert
    load equal slices if the slices are multiples of `alignment`; otherwise, or if the engine moves experts by load,
    they load the whole expert. `host_ranks`: first rank of each engine.
    """

    @cache
    def ranks(expert: int | None, count: int) -> Mapping[Slice, tuple[int, ...]]:
        kept = [i for i in range(parallelism.gpus) if expert is None or parallelism.keeps_expert(i, expert)]
        by_slice: dict[Slice, tuple[int, ...]] = {}
        for number in range(count):
            mine = [index for index in kept if index % count == number]
            by_slice[Slice(number, count)] = tuple(host + index for host in host_ranks for index in mine)
        return by_slice

    def readers(group: ParamGroup) -> Mapping[Slice, tuple[int, ...]]:
        count = 1 if parallelism.moves_experts else parallelism.expert_tensor
        divides = group.divided and not any(size % (count * alignment) for size in group.divided)
        return ranks(group.expert, count if divides else 1)

    return readers


def group_params(params: Mapping[str, Param]) -> tuple[ParamGroup, ...]:
    """Group the parameters by layer, expert and load group, without aliases; return the groups in layer order."""
    members: dict[tuple[int, int, str], list[Param]] = {}
    for param in params.values():
        if not param.alias:
            layer, expert = (-1 if number is None else number for number in (param.layer, param.expert))
            name = "" if param.expert is not None else param.load_group or param.name
            members.setdefault((layer, expert, name), []).append(param)
    return tuple(_param_group(members[key]) for key in sorted(members))


def _param_group(params: Sequence[Param]) -> ParamGroup:
    expert = params[0].expert
    divided = set()
    if expert is not None:
        divided = {shape[p.tp_dim] for p in params if p.tp_dim is not None for shape in p.shapes}
    return ParamGroup(tuple(param.name for param in params), expert, tuple(sorted(divided)))


def find_holders(
    params: Mapping[str, Param], shards_by_rank: Sequence[Mapping[str, int]], parts: Callable[[str], int]
) -> Holders:
    """Return the ranks that hold each tensor-parallel part of each parameter, without aliases.

    `shards_by_rank`: for each rank: parameter name -> index of the rank's part; `parts`: returns the number of parts of
    a parameter. Raises ValueError for a missing part.
    """
    holders: dict[str, dict[int, list[int]]] = {name: {} for name, param in params.items() if not param.alias}
    for rank, shards in enumerate(shards_by_rank):
        for name in shards.keys() & holders.keys():
            holders[name].setdefault(shards[name], []).append(rank)
    for name, ranks_by_part in holders.items():
        if not ranks_by_part:
            raise ValueError(f"no rank holds {name}")
        if sorted(ranks_by_part) != list(range(parts(name))):
            raise ValueError(f"{name}: of {parts(name)} parts only {sorted(ranks_by_part)} are held")
    return holders


def _merge_sliced(
    groups: Sequence[ParamGroup], holders: Holders, readers: Readers, sizes: ShardSizes, most_bytes: int
) -> list[ParamGroup]:
    """Merge adjacent sliced experts with equal holders and readers into groups of at most `most_bytes` for each slice.

    Otherwise large jobs would have millions of transfers.
    """
    merged: list[ParamGroup] = []
    size = 0
    for group in groups:
        by_slice = readers(group)
        added = sum(sizes.staged(Piece(name, next(iter(by_slice)))) for name in group.names)
        held = [holders[name] for name in group.names]
        last = merged[-1] if merged and len(by_slice) > 1 and size + added <= most_bytes else None
        if last and readers(last) == by_slice and [holders[name] for name in last.names[-len(held) :]] == held:
            merged[-1] = replace(last, names=last.names + group.names)
            size += added
        else:
            merged.append(group)
            size = added
    return merged


def _transfers(
    groups: Sequence[ParamGroup],
    holders: Holders,
    readers: Readers,
    ranks_per_node: int,
    sizes: ShardSizes,
) -> list[Transfer]:
    """Return the transfers, with receivers and senders chosen to balance staged and sent bytes over ranks.

    A shard comes from the receiver itself if possible, otherwise from its node, otherwise from another node.
    """
    staged: dict[int, int] = {}
    sent: dict[int, int] = {}
    transfers = []
    for group in groups:
        for slice_, ranks in readers(group).items():
            size = sum(sizes.staged(Piece(name, slice_)) for name in group.names)
            for node, on_node in groupby(sorted(ranks), lambda rank: rank // ranks_per_node):
                node_readers = tuple(on_node)
                receiver = min(node_readers, key=lambda rank: (staged.get(rank, 0), rank))
                staged[receiver] = staged.get(receiver, 0) + size
                sources = []
                for name in group.names:
                    chosen = []
                    for part in slice_.overlaps(len(holders[name])):
                        source = _choose_sender(
                            holders[name][part], receiver, node=node, ranks_per_node=ranks_per_node, sent=sent
                        )
                        chosen.append((part, source))
                        if source != receiver:
                            sent[source] = sent.get(source, 0) + sizes.sent(Shard(name, part, slice_))
                    sources.append(tuple(chosen))
                transfers.append(
                    Transfer(group.names, tuple(sources), receiver=receiver, readers=node_readers, slice=slice_)
                )
    return transfers


def _choose_sender(
    candidates: Sequence[int], receiver: int, node: int, ranks_per_node: int, sent: Mapping[int, int]
) -> int:
    if receiver in candidates:
        return receiver
    return min(candidates, key=lambda rank: (rank // ranks_per_node != node, sent.get(rank, 0), rank))


def _fill_rounds(
    transfers: Sequence[Transfer], sizes: ShardSizes, round_bytes: int
) -> tuple[tuple[Transfer, ...], ...]:
    """Assign each transfer to the first round with free memory on all ranks that send, receive or load it."""
    needs = [_bytes_by_rank(transfer, sizes) for transfer in transfers]
    totals: dict[Use, int] = {}
    for need in needs:
        for use, size in need.items():
            totals[use] = totals.get(use, 0) + size
    most = {kind: max((size for (k, _), size in totals.items() if k == kind), default=0) for kind in ("sends", "loads")}
    # Limit sends to an even share of all rounds: a round in which a rank sends most of its shards would take long.
    even = SEND_SLACK * most["sends"] / -(-max(most["loads"], 1) // round_bytes)
    limits: dict[str, float] = {"receives": round_bytes, "loads": round_bytes}
    rounds: list[list[Transfer]] = []
    used: list[dict[Use, int]] = []
    first_open: dict[Use, int] = {}
    large = [max(need.values()) > round_bytes / 2 for need in needs]  # two of these do not fit into a rank's round
    for index in _order(transfers, large):
        need = needs[index]
        # Large transfers are sent to as many nodes at the same time as the memory of a round allows.
        limits["sends"] = max(round_bytes, *need.values()) if large[index] else min(round_bytes, even)
        number = max(first_open.get(use, 0) for use in need)
        while number < len(rounds) and any(
            used[number].get(use) and used[number][use] + size > limits[use[0]] for use, size in need.items()
        ):
            number += 1
        if number == len(rounds):
            rounds.append([])
            used.append({})
        rounds[number].append(transfers[index])
        for use, size in need.items():
            used[number][use] = used[number].get(use, 0) + size
            if used[number][use] >= limits[use[0]]:
                first_open[use] = number + 1
    return tuple(map(tuple, rounds))


def _bytes_by_rank(transfer: Transfer, sizes: ShardSizes) -> dict[Use, int]:
    size = sum(map(sizes.staged, transfer.pieces()))
    need: dict[Use, int] = {("loads", reader): size for reader in transfer.readers}
    for source, shard in transfer.shards():
        if source != transfer.receiver:
            for use in (("sends", source), ("receives", transfer.receiver)):
                need[use] = need.get(use, 0) + sizes.sent(shard)
    return need


def _order(transfers: Sequence[Transfer], large: Sequence[bool]) -> list[int]:
    """Return the indices of the transfers in launch order: large transfers first, then receivers at different layers.

    Pipeline stages hold consecutive layers: if all receivers started with the first layer, only its stage would send.
    """
    queues: dict[int, list[int]] = {}
    for index, transfer in enumerate(transfers):
        if not large[index]:
            queues.setdefault(transfer.receiver, []).append(index)
    places = []
    for number, receiver in enumerate(sorted(queues)):
        queue = queues[receiver]
        start = number * GOLDEN_RATIO % 1  # neighbors share senders: start far apart
        places += [((place / len(queue) - start) % 1, number, index) for place, index in enumerate(queue)]
    return [index for index, is_large in enumerate(large) if is_large] + [index for *_, index in sorted(places)]


def _rank_round(transfers: Sequence[Transfer], rank: int) -> RankRound:
    work = RankRound()
    for transfer in transfers:
        if rank in transfer.readers:
            work.loads.setdefault(transfer.receiver, []).extend(transfer.pieces())
            if others := tuple(reader for reader in transfer.readers if reader != transfer.receiver):
                work.shares.setdefault((transfer.receiver, others), []).extend(transfer.pieces())
        if transfer.receiver == rank:
            work.staged += transfer.pieces()
        for source, shard in transfer.shards():
            if source == transfer.receiver == rank:
                work.own.append(shard)
            elif source == rank:
                work.sends.setdefault(transfer.receiver, []).append(shard)
            elif transfer.receiver == rank:
                work.receives.setdefault(source, []).append(shard)
    return work
