"""Layers over pipeline stages so that the fullest stage holds least."""

from collections.abc import Sequence

from grpo_mp.planner.parameter_count import Table


def balanced(sizes: Sequence[int], stages: int, first: int = 0, last: int = 0) -> list[int]:
    """How many consecutive layers each stage gets, at least one. `first` and `last`: what the ends hold besides.

    Raises ValueError where there are fewer layers than stages.
    """
    if len(sizes) < stages:
        raise ValueError(f"{len(sizes)} layers do not give {stages} stages one each")
    low, high = max(sizes), sum(sizes) + first + last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _filled(sizes, stages, first, last, middle) else (middle + 1, high)
    return _filled(sizes, stages, first, last, low) or []


def pipeline_text(counts: Sequence[int]) -> str:
    """Megatron's notation: `Et*17|t*15|t*14L`."""
    return "E" + "|".join(f"t*{count}" for count in counts) + "L"


def balanced_text(table: Table, stages: int) -> str:
    """The balanced pipeline of a model in Megatron's notation."""
    sizes = [table.layers[layer].total for layer in sorted(table.layers)]
    return pipeline_text(balanced(sizes, stages, table.embedding.total, table.final.total))


def _filled(sizes: Sequence[int], stages: int, first: int, last: int, limit: int) -> list[int] | None:
    """Fill stage after stage up to `limit`, leaving one layer for each that follows; None where they are too few."""
    counts, place = [], 0
    for stage in range(stages):
        held = first if stage == 0 else last if stage == stages - 1 else 0
        taken, left = 0, stages - stage - 1
        while place < len(sizes) - left and (held + sizes[place] <= limit):
            held += sizes[place]
            place, taken = place + 1, taken + 1
        if not taken:
            return None
        counts.append(taken)
    return counts if place == len(sizes) else None
