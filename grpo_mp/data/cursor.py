"""The run's position in its prompt set: a seeded permutation per epoch and a position that can be saved."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Cursor:
    """The next prompt to take is the one at `position` of the order of `epoch`."""

    epoch: int = 0
    position: int = 0
    seed: int = 0
    deferred: tuple[int, ...] = ()  # prompts that this epoch takes last, in this order: the end of the epoch before


def take(
    cursor: Cursor, size: int, count: int, shuffle: bool, recent: Collection[int] = ()
) -> tuple[tuple[int, ...], Cursor]:
    """Take the next `count` indices out of `size` prompts; return them and the cursor after them.

    Every epoch holds every prompt once. A take that runs over the end of an epoch continues in the next one and
    repeats no prompt, neither its own nor `recent` ones, unless they are more than `size`. Raises ValueError for a
    cursor of a larger set.
    """
    if size <= 0 or count < 0 or not 0 <= cursor.position <= size:
        raise ValueError(f"cannot take {count} of {size} prompts at position {cursor.position}")
    taken: list[int] = []
    while len(taken) < count:
        if cursor.position == size:
            # Prompts that were just taken move to the end of the new epoch, so that none is drawn twice.
            held = tuple(dict.fromkeys((*recent, *taken)))
            deferred = held if len(held) < size else ()
            cursor = Cursor(cursor.epoch + 1, 0, cursor.seed, deferred)
        end = min(size, cursor.position + count - len(taken))
        taken.extend(epoch_order(replace(cursor, position=0), size, shuffle)[cursor.position : end])
        cursor = Cursor(cursor.epoch, end, cursor.seed, cursor.deferred)
    return tuple(taken), cursor


def taken_before(cursor: Cursor, size: int, count: int, shuffle: bool) -> tuple[int, ...]:
    """Return the last `count` indices, or fewer, that were taken before the cursor by takes that knew as many."""
    order = epoch_order(replace(cursor, position=0), size, shuffle)[: cursor.position]
    return (*cursor.deferred, *order)[-count:] if count else ()


@lru_cache(maxsize=2)
def epoch_order(cursor: Cursor, size: int, shuffle: bool) -> tuple[int, ...]:
    """Return all prompts in the order of the cursor's epoch: its permutation, then the deferred ones as they are."""
    if shuffle:
        order = np.random.default_rng([cursor.seed % 2**64, cursor.epoch]).permutation(size)
    else:
        order = np.arange(size)
    deferred = np.array(cursor.deferred, dtype=np.int64)
    return tuple(np.concatenate([order[~np.isin(order, deferred)], deferred]).tolist())
