"""Plan of a weight sync: which shard goes from which rank to which, in which bucket. Pure data.

Parameters are bucketed by atom: one layer without its experts, one expert, or one tensor outside the layers. An atom
is never split over buckets, because engines fuse tensors (gate and up, the two latent down-projections) only within
one update call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from grpo_mp.models.mapping import Param


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Says that `rank` holds tensor-parallel part `part` of the parameter `name`."""

    name: str
    part: int
    rank: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One shard from rank `source` to rank `target`, which may be equal. Large jobs have millions: hence slots."""

    name: str
    part: int
    source: int
    target: int


@dataclass(frozen=True)
class Bucket:
    """Parameters sent together. `nbytes`: of their full Hugging Face tensors."""

    names: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    nbytes: int


@dataclass(frozen=True)
class SyncPlan:
    """Buckets that hold each parameter once and bring each of its parts to each target once."""

    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(bucket.nbytes for bucket in self.buckets)


def plan_sync(
    params: Mapping[str, Param],
    shards: Iterable[LocalShard],
    targets: Sequence[int],
    bucket_bytes: int,
    itemsize: Mapping[str, int],
) -> SyncPlan:
    """Plan the transfers of all parameters to all `targets` (ranks).

    A target uses its own shard where it has one, else those of the holders in turn, which balances the load over
    replicas. `itemsize`: bytes per element of each parameter. An atom larger than `bucket_bytes` gets a bucket
    of its own. Raises ValueError where no rank holds a parameter or one of its parts is missing.
    """
    holders = _holders(params, shards)
    buckets: list[Bucket] = []
    names: list[str] = []
    size = 0
    for atom in _atoms(params):
        nbytes = sum(full_bytes(params[name], itemsize[name]) for name in atom)
        if names and size + nbytes > bucket_bytes:
            buckets.append(_bucket(names, size, holders, targets))
            names, size = [], 0
        names += atom
        size += nbytes
    if names:
        buckets.append(_bucket(names, size, holders, targets))
    return SyncPlan(tuple(buckets))


def full_bytes(param: Param, itemsize: int) -> int:
    """Return the bytes of one parameter's full Hugging Face tensors."""
    return sum(prod(shape) for shape in param.shapes) * itemsize


def _atoms(params: Mapping[str, Param]) -> list[list[str]]:
    atoms: dict[tuple[object, ...], list[str]] = {}
    for name, param in params.items():
        key = (param.layer, param.expert) if param.layer is not None else (name,)
        atoms.setdefault(key, []).append(name)
    return list(atoms.values())


def _holders(params: Mapping[str, Param], shards: Iterable[LocalShard]) -> dict[str, dict[int, list[int]]]:
    """Return parameter name -> part -> ranks that hold it."""
    holders: dict[str, dict[int, list[int]]] = {name: {} for name in params}
    for shard in shards:
        holders[shard.name].setdefault(shard.part, []).append(shard.rank)
    for name, parts in holders.items():
        if not parts:
            raise ValueError(f"no rank holds {name}")
        if sorted(parts) != list(range(len(parts))):
            raise ValueError(f"{name}: parts {sorted(parts)} are held, one is missing")
    return holders


def _bucket(
    names: Sequence[str], nbytes: int, holders: Mapping[str, dict[int, list[int]]], targets: Sequence[int]
) -> Bucket:
    transfers = tuple(
        Transfer(name, part, target if target in ranks else ranks[index % len(ranks)], target)
        for name in names
        for part, ranks in sorted(holders[name].items())
        for index, target in enumerate(targets)
    )
    return Bucket(tuple(names), transfers, nbytes)
