"""Find the parameters that changed since the last weight sync, by fingerprints, and leave the others out of a sync."""

from collections.abc import Mapping, Sequence, Set
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.weight_sync.plan import Key, ParamGroup, Piece, RankRound, Shard

CHUNK_WORDS: Final = 2**20  # 8 MiB; the temporary memory of a fingerprint is three times that
WORD_BYTES = 8
MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15


class ChangeTracker:
    """Remembers the fingerprints of what was sent. `names`: all parameters that are sent, the same on every rank."""

    def __init__(self, names: Sequence[str], group: dist.ProcessGroup) -> None:
        """Begin with nothing sent. `group`: a gloo group of all ranks."""
        self._numbers = {name: number for number, name in enumerate(names)}
        self._group = group
        self._sent: dict[str, int] = {}
        self.unchanged: frozenset[str] = frozenset()  # names that the last call did not return
        self._factors: Tensor | None = None

    def take_changes(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names that differ from the last call's on any rank; at first all. Every rank must call this.

        `tensors`: this rank's shards by name.
        """
        now = {name: self._fingerprint(tensors[name]) for name in self._numbers.keys() & tensors.keys()}
        changed = torch.zeros(len(self._numbers), dtype=torch.uint8)
        for name, fingerprint in now.items():
            changed[self._numbers[name]] = self._sent.get(name) != fingerprint
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        self._sent = now
        names = {name for name, number in self._numbers.items() if changed[number]}
        self.unchanged = frozenset(self._numbers.keys() - names)
        return names

    def forget(self) -> None:
        """Let the next call return all names: what was sent is not known to be there any more."""
        self._sent = {}

    def _fingerprint(self, tensor: Tensor) -> int:
        if self._factors is None or self._factors.device != tensor.device:
            self._factors = random_factors(CHUNK_WORDS).to(tensor.device)
        return fingerprint(tensor, self._factors)


def random_factors(count: int) -> Tensor:
    """Return int64 [count] of odd random numbers, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(0)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(low, high, (count,), generator=generator) | 1


@torch.no_grad()
def fingerprint(tensor: Tensor, factors: Tensor) -> int:
    """Return a 64-bit number of a tensor's bits: a sum of 64-bit words, each times its place's random number.

    Tensors that differ in one word never have the same; others do by chance, at worst once in 2**32. It is computed
    where the tensor is, and only the number is copied. `factors`: of `random_factors`.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // WORD_BYTES * WORD_BYTES
    sums = [_hash(chunk, factors) for chunk in flat[:whole].view(torch.int64).split(len(factors))]
    if whole < len(flat):
        tail = torch.cat([flat[whole:], flat.new_zeros(WORD_BYTES - len(flat) + whole)])
        sums.append(_hash(tail.view(torch.int64), factors))
    total = 0
    for number in torch.stack(sums).tolist():
        total = (total * ODD + number) & MASK  # so that the order of chunks counts
    return total


def _hash(words: Tensor, factors: Tensor) -> Tensor:
    # A product's low bits depend on the low bits only: without the exclusive or, changes of the last number in each
    # word would be told from the sixteen highest bits alone.
    return ((words ^ ((words >> 32) & 0xFFFFFFFF)) * factors[: len(words)]).sum()


def keep_changed(rounds: Sequence[RankRound], changed: Set[str], groups: Sequence[ParamGroup]) -> tuple[RankRound, ...]:
    """Return a rank's rounds with those groups only of which a parameter changed; rounds without any go.

    All ranks keep the same rounds where they are given the same `changed`.
    """
    kept = {name for group in groups if not changed.isdisjoint(group.names) for name in group.names}
    return tuple(_keep(round_, kept) for round_ in rounds if not kept.isdisjoint(round_.names))


def _keep(round_: RankRound, kept: set[str]) -> RankRound:
    def shards(by_rank: Mapping[int, tuple[Shard, ...]]) -> dict[int, tuple[Shard, ...]]:
        filtered = {rank: tuple(shard for shard in items if shard.name in kept) for rank, items in by_rank.items()}
        return {rank: items for rank, items in filtered.items() if items}

    def pieces(by_key: Mapping[Key, tuple[Piece, ...]]) -> dict[Key, tuple[Piece, ...]]:
        filtered = {key: tuple(piece for piece in items if piece.name in kept) for key, items in by_key.items()}
        return {key: items for key, items in filtered.items() if items}

    return RankRound(
        sends=shards(round_.sends),
        receives=shards(round_.receives),
        own=tuple(shard for shard in round_.own if shard.name in kept),
        staged=tuple(piece for piece in round_.staged if piece.name in kept),
        shares=pieces(round_.shares),
        loads=pieces(round_.loads),
        names=round_.names & kept,
    )
