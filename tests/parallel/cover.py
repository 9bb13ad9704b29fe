"""A few layouts in which every two sizes meet that meet in many layouts."""

from collections.abc import Iterable, Mapping
from itertools import combinations

Pairs = frozenset[tuple[tuple[str, int], tuple[str, int]]]
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")


def size_pairs(ranks: int, sizes: Mapping[str, int]) -> Pairs:
    """Every two of a layout's seven sizes; data parallelism is what remains of the ranks."""
    values = {name: sizes.get(name, 1) for name in SIZES}
    values["data"] = ranks // (values["tensor"] * values["pipeline"] * values["context"])
    return frozenset(combinations(values.items(), 2))


def pairwise_cover(pairs: Mapping[str, Pairs], keep: Iterable[str] = ()) -> tuple[str, ...]:
    """Choose layouts that have all the pairs of all of them: `keep`, then the one that adds most, and so on.

    Returns their names in the order of `pairs`.
    """
    chosen = set(keep)
    missing = set().union(*pairs.values()).difference(*(pairs[name] for name in chosen))
    while missing:
        most = max(pairs, key=lambda name: len(pairs[name] & missing))
        chosen.add(most)
        missing -= pairs[most]
    return tuple(name for name in pairs if name in chosen)
