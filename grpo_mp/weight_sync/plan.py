"""Plan of a weight sync: which shard goes from which rank to which, in which bucket. Pure data.

Parameters are bucketed by atom: one layer without its experts, one expert, or one tensor outside the layers. An atom
is never split over buckets, because engines fuse tensors (gate and up, the two latent down-projections) only within
one update call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_mp.models.mapping import Param, split_by_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """One shard from rank `source` to rank `target`, which may be equal. Large jobs have millions: hence slots."""

    name: str
    part: int
    source: int
    target: int


@dataclass(frozen=True)
class Bucket:
    """Parameters sent together."""

    names: tuple[str, ...]
    transfers: tuple[Transfer, ...]


def plan_sync(
    params: Mapping[str, Param],
    parts: Sequence[Mapping[str, int]],
    targets: Sequence[int],
    bucket_bytes: int,
    itemsize: Mapping[str, int],
) -> tuple[Bucket, ...]:
    """Plan buckets that hold each parameter once and bring each of its parts to each of the `targets` (ranks) once.

    `parts`: of every rank, the tensor-parallel part that it has of each of its parameters. A target uses its own shard
    where it has one, else those of the holders in turn, which balances the load over replicas. `itemsize`: bytes per
    element of each parameter. An atom larger than `bucket_bytes` gets a bucket of its own.
    Raises ValueError where no rank holds a parameter or one of its parts is missing.
    """
    holders = _holders(params, parts)
    atoms: dict[object, list[str]] = {}
    for name, param in params.items():
        atoms.setdefault((param.layer, param.expert) if param.layer is not None else name, []).append(name)
    sizes = {atom: sum(params[name].num_elements * itemsize[name] for name in names) for atom, names in atoms.items()}
    buckets = []
    for group, _ in split_by_bytes(sizes, bucket_bytes):
        names = tuple(name for atom in group for name in atoms[atom])
        transfers = tuple(
            Transfer(name, part, target if target in ranks else ranks[index % len(ranks)], target)
            for name in names
            for part, ranks in sorted(holders[name].items())
            for index, target in enumerate(targets)
        )
        buckets.append(Bucket(names, transfers))
    return tuple(buckets)


def _holders(params: Mapping[str, Param], parts: Sequence[Mapping[str, int]]) -> dict[str, dict[int, list[int]]]:
    """Return parameter name -> part -> ranks that hold it."""
    holders: dict[str, dict[int, list[int]]] = {name: {} for name in params}
    for rank, local_parts in enumerate(parts):
        for name in local_parts.keys() & params.keys():
            holders[name].setdefault(local_parts[name], []).append(rank)
    for name, ranks_by_part in holders.items():
        if not ranks_by_part:
            raise ValueError(f"no rank holds {name}")
        if sorted(ranks_by_part) != list(range(len(ranks_by_part))):
            raise ValueError(f"{name}: parts {sorted(ranks_by_part)} are held, one is missing")
    return holders
