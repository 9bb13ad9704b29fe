"""Sends the choices of engines (routing replay R3) to the ranks that replay them in routers and in sparse attention.

The experts of a token in a layer are sent once, from the engine's rank to the one rank that computes this token in
this layer. It is given by the replica that trains on the sample, the layer's pipeline stage, the context slice, and
the tensor rank's part of the slice. Keys are sent to every tensor rank, since each computes some heads of all tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from grpo_mp.batching.exchange import all_to_all_bytes
from grpo_mp.batching.packing import context_index, token_origins
from grpo_mp.batching.updates import UpdatePlan
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.utils.types import ExpertIds, ReplayedChoices, Sample, SampleGroup, SampleInfo

RANGE_BYTES = 8  # a range of consecutive rows: first row and count, int32 each
Ranges = npt.NDArray[np.int32]  # [n, 2]: first row, count


def exchange_routed_experts(
    groups: list[SampleGroup],
    infos: Sequence[SampleInfo],
    plan: Sequence[UpdatePlan],
    layers: Sequence[int],
    job: Job,
    key_layers: Sequence[int] = (),
) -> list[list[ReplayedChoices | None]]:
    """Return the experts, and keys if samples have them, of each micro-batch that this rank trains on, by update.

    `groups`: from this rank's engine; their experts are removed and freed as they are sent, one micro-batch of each
    replica at a time. `infos`: of all sequences of the step, which `plan` indexes. `layers`: MoE layers of this rank;
    `key_layers`: its layers with an indexer; both empty on a rank that does not train. Samples without experts have no
    rows in the result.
    """
    by_key = _take(groups)
    local = {i: by_key.pop(info.key) for i, info in enumerate(infos) if info.key in by_key}
    keys = {i: choices["keys"] for i, choices in local.items() if choices.dtype.names}
    local = {i: choices["experts"] if choices.dtype.names else choices for i, choices in local.items()}
    experts = _exchange(local, plan, layers, job)
    of_keys = _exchange(keys, plan, key_layers, job, are_keys=True)
    return [
        [routed and replace(routed, keys=chosen) for routed, chosen in zip(*of_update, strict=True)]
        for of_update in zip(experts, of_keys, strict=True)
    ]


def _exchange(
    local: dict[int, ExpertIds], plan: Sequence[UpdatePlan], layers: Sequence[int], job: Job, are_keys: bool = False
) -> list[list[ReplayedChoices | None]]:
    """Send the choices `local`, by sequence of the step; return those for this rank, by update and micro-batch."""
    kinds = {(experts.dtype.str, experts.shape[2]) for experts in local.values()}
    gathered = all_gather((tuple(layers), kinds), job.group)
    all_layers = sorted({layer for of_rank, _ in gathered for layer in of_rank})
    columns = [[all_layers.index(layer) for layer in of_rank] for of_rank, _ in gathered]
    kind = next(iter(set().union(*(kinds for _, kinds in gathered))), None)
    if kind is None:
        return [[None] * update.schedule.microbatches for update in plan]
    train_ranks = job.world_size - job.engine_ranks
    received: list[list[ReplayedChoices | None]] = []
    for update in plan:
        of_update = {number: local.pop(i) for number, i in enumerate(update.samples) if i in local}
        received.append([])
        for number in range(update.schedule.microbatches):
            outgoing = _outgoing(update, number, of_update, columns[:train_ranks], are_keys)
            parts = all_to_all_bytes(outgoing + [b""] * job.engine_ranks, job.group)
            received[-1].append(_joined(parts, len(layers), *kind))
            for sample in (sample for plans in update.schedule.ranks for sample in plans[number].samples):
                of_update.pop(sample, None)
    return received


def _take(groups: list[SampleGroup]) -> dict[tuple[int, ...], ExpertIds]:
    """Remove the experts from the groups in place; return them by the key of their sequence."""
    taken = dict[tuple[int, ...], ExpertIds]()
    for number, group in enumerate(groups):
        taken |= experts_of_group(group)
        groups[number] = without_experts(group)
    return taken


def with_experts(group: SampleGroup, experts: Mapping[tuple[int, ...], ExpertIds]) -> SampleGroup:
    """Return the group with its experts replaced by `experts` (sequence key -> experts, None if missing)."""

    def exchange(sample: Sample) -> Sample:
        return replace(sample, routed_experts=experts.get(sample.key), earlier=tuple(map(exchange, sample.earlier)))

    return replace(group, samples=tuple(map(exchange, group.samples)))


def without_experts(group: SampleGroup) -> SampleGroup:
    """Return the group without experts."""
    return with_experts(group, {})


def experts_of_group(group: SampleGroup) -> dict[tuple[int, ...], ExpertIds]:
    """Return the experts of a group's sequences by sequence key, without sequences that have no experts."""
    sequences = (part for sample in group.samples for part in sample.sequences)
    return {part.key: part.routed_experts for part in sequences if part.routed_experts is not None}


def _outgoing(
    update: UpdatePlan,
    number: int,
    experts: Mapping[int, ExpertIds],
    columns: Sequence[Sequence[int]],
    are_keys: bool = False,
) -> list[bytes]:
    """Return the bytes for each training rank in micro-batch `number` of every replica: row ranges and experts.

    `experts`: experts or keys by sample of the update. `columns`: for each training rank, the columns of `experts` with
    its layers.
    """
    layout = update.rule.layout
    align = update.schedule.align
    pad_to = update.padded_size
    places = [coordinates(rank, layout, len(columns)) for rank in range(len(columns))]
    origins = [token_origins(plans[number], align, pad_to) for plans in update.schedule.ranks]
    content = []
    chosen = dict[tuple[int, int, int], tuple[Ranges, ExpertIds | None]]()
    for place, layers in zip(places, columns, strict=True):
        key = (place.data, place.context, 0 if are_keys else place.tensor)
        if key not in chosen:
            tokens, lengths = origins[place.data]
            own = tokens[context_index(lengths, layout.context, place.context)]
            part = own if are_keys else own.chunk(layout.tensor)[place.tensor]
            chosen[key] = _select(part.numpy(), experts, are_keys)
        ranges, of_rows = chosen[key]
        content.append(b"" if of_rows is None or not layers else _packed(ranges, of_rows[:, layers]))
    return content


def _packed(ranges: Ranges, experts: ExpertIds) -> bytes:
    """Serialize the number of ranges, the ranges, and the experts."""
    return np.array([len(ranges)], np.int32).tobytes() + ranges.tobytes() + experts.tobytes()


def _unpacked(content: npt.NDArray[np.uint8], layers: int, dtype: str, topk: int) -> tuple[Ranges, ExpertIds]:
    """Return the ranges and experts that `_packed` serialized."""
    begin = 4 + RANGE_BYTES * int(content[:4].view(np.int32)[0])
    return content[4:begin].view(np.int32).reshape(-1, 2), content[begin:].view(dtype).reshape(-1, layers, topk)


def _select(
    origins: npt.NDArray[np.int64], experts: Mapping[int, ExpertIds], are_keys: bool
) -> tuple[Ranges, ExpertIds | None]:
    """Return the ranges of rows whose sample is in `experts`, and their experts or keys [rows, layers, top-k], or None.

    `origins`: sample and token of each row. The first top-k tokens of a sequence attend to all keys before them.
    """
    ranges = []
    of_rows = []
    for sample in np.unique(origins[:, 0]).tolist():
        if sample in experts:
            first = experts[sample].shape[2] if are_keys else 0
            has_choices = (origins[:, 1] >= first) & (origins[:, 1] < len(experts[sample]))
            at = np.flatnonzero((origins[:, 0] == sample) & has_choices)
            ranges.append(_ranges(at))
            of_rows.append(experts[sample][origins[at, 1]])
    return (np.concatenate(ranges), np.concatenate(of_rows)) if ranges else (np.empty((0, 2), np.int32), None)


def _ranges(rows: npt.NDArray[np.int64]) -> Ranges:
    """Compress sorted row numbers into ranges of consecutive rows."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return np.stack([rows[starts], np.diff(starts, append=len(rows))], axis=1).astype(np.int32)


def _joined(parts: Iterable[torch.Tensor], layers: int, dtype: str, topk: int) -> ReplayedChoices:
    """Merge the parts from all ranks, sorted by row."""
    pieces: list[tuple[Ranges, ExpertIds]] = [(np.empty((0, 2), np.int32), np.empty((0, layers, topk), dtype))]
    pieces += [_unpacked(part.numpy(), layers, dtype, topk) for part in parts if len(part)]
    ranges = np.concatenate([ranges for ranges, _ in pieces])
    of_ranges = [of for ranges, experts in pieces for of in np.split(experts, ranges[:, 1].cumsum())[:-1]]
    order = ranges[:, 0].argsort()
    experts = np.concatenate([pieces[0][1], *(of_ranges[i] for i in order)])
    return ReplayedChoices(torch.from_numpy(ranges[order]), torch.from_numpy(experts))
