"""Which shard of which parameter travels from which rank to which rank, in which bucket. Pure data.

The unit is an atom: the parameters of one layer without its experts, one expert, or one tensor outside the
layers. An atom is never divided over two buckets, because engines fuse tensors (gate and up, the two latent
down-projections) only inside one update call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_mp.models.mapping import Param


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One rank holds tensor-parallel part `part` of the parameter `name`."""

    name: str
    part: int
    rank: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A shard on its way. `source == target`: it is there already. A large model on many ranks has millions."""

    name: str
    part: int
    source: int
    target: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are in flight together. `nbytes`: of their whole Hugging Face tensors."""

    names: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    nbytes: int


@dataclass(frozen=True)
class SyncPlan:
    """Every parameter in exactly one bucket; every part of it reaches every target exactly once."""

    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def plan_sync(
    params: Mapping[str, Param],
    holdings: Iterable[LocalShard],
    targets: Sequence[int],
    bucket_bytes: int,
    itemsize: Mapping[str, int],
) -> SyncPlan:
    """Plan the way of all parameters to all `targets` (ranks).

    A target takes a shard from itself where it can, else from the holders in turn, so that replicas share
    the work. `itemsize`: bytes per element of each parameter. An atom larger than `bucket_bytes` gets a bucket
    of its own. Raises ValueError where no rank holds a parameter, or a part below the highest that is held.
    """
    holders = _holders(params, holdings)
    buckets: list[Bucket] = []
    names: list[str] = []
    size = 0
    for atom in _atoms(params):
        nbytes = sum(whole_bytes(params[name], itemsize[name]) for name in atom)
        if names and size + nbytes > bucket_bytes:
            buckets.append(_bucket(names, size, holders, targets))
            names, size = [], 0
        names += atom
        size += nbytes
    if names:
        buckets.append(_bucket(names, size, holders, targets))
    return SyncPlan(tuple(buckets))


def whole_bytes(param: Param, itemsize: int) -> int:
    """Bytes of the Hugging Face tensors of one parameter."""
    total = 0
    for shape in param.shapes:
        elements = 1
        for size in shape:
            elements *= size
        total += elements * itemsize
    return total


def _atoms(params: Mapping[str, Param]) -> list[list[str]]:
    atoms: dict[tuple[object, ...], list[str]] = {}
    for name, param in params.items():
        key = (param.layer, param.expert) if param.layer is not None else (name,)
        atoms.setdefault(key, []).append(name)
    return list(atoms.values())


def _holders(params: Mapping[str, Param], holdings: Iterable[LocalShard]) -> dict[str, dict[int, list[int]]]:
    holders: dict[str, dict[int, list[int]]] = {name: {} for name in params}
    for held in holdings:
        holders[held.name].setdefault(held.part, []).append(held.rank)
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
        Transfer(name, part, _source(ranks, target, turn), target)
        for name in names
        for part, ranks in sorted(holders[name].items())
        for turn, target in enumerate(targets)
    )
    return Bucket(tuple(names), transfers, nbytes)


def _source(ranks: Sequence[int], target: int, turn: int) -> int:
    return target if target in ranks else ranks[turn % len(ranks)]
