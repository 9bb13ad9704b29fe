"""The order of a run's prompts: a seeded permutation per epoch, and a cursor in it that can be saved."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Cursor:
    """Position in the order of prompts: the next prompt is number `position` of the order of `epoch`."""

    epoch: int = 0
    position: int = 0
    seed: int = 0
    deferred: tuple[int, ...] = ()  # prompts drawn last in this epoch, in this order: the epoch before ended with them


@dataclass(frozen=True)
class SetShare:
    """A data set of a mixture: its `size` prompts are numbered from `first` on, and an epoch draws `count` of them."""

    first: int
    size: int
    count: int


Mixture = tuple[SetShare, ...]  # (): a single set, which an epoch draws completely


def mix_sets(sizes: Sequence[int], weights: Sequence[float]) -> Mixture:
    """Return the share of each set in an epoch: proportional to its weight, as large as possible without repetition."""
    epoch = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    counts = [max(1, min(size, round(weight * epoch))) for size, weight in zip(sizes, weights, strict=True)]
    firsts = accumulate(sizes, initial=0)
    return tuple(SetShare(*numbers) for numbers in zip(firsts, sizes, counts, strict=False))


def take(
    cursor: Cursor, size: int, count: int, shuffle: bool, recent: Collection[int] = (), mixture: Mixture = ()
) -> tuple[tuple[int, ...], Cursor]:
    """Draw the next `count` of an epoch's `size` prompts; return their indices and the cursor after them.

    An epoch draws every prompt once, or a part of each set of a `mixture`. A draw across the end of an epoch repeats
    neither its own prompts nor `recent` ones, unless these are `size` or more.
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
        order = epoch_order(replace(cursor, position=0), size, shuffle, mixture)
        taken.extend(order[cursor.position : end].tolist())
        cursor = Cursor(cursor.epoch, end, cursor.seed, cursor.deferred)
    return tuple(taken), cursor


def taken_before(cursor: Cursor, size: int, count: int, shuffle: bool, mixture: Mixture = ()) -> tuple[int, ...]:
    """Return the last `count` indices that were drawn before the cursor, or fewer.

    Assumes that every draw knew at least its `count` predecessors as `recent`.
    """
    first = max(0, cursor.position - count)
    order = epoch_order(replace(cursor, position=0), size, shuffle, mixture)[first : cursor.position]
    return (*cursor.deferred, *order.tolist())[-count:] if count else ()


@lru_cache(maxsize=2)
def epoch_order(cursor: Cursor, size: int, shuffle: bool, mixture: Mixture = ()) -> npt.NDArray[np.int64]:
    """Return the indices of the epoch's prompts in order: the permutation, then the deferred prompts."""
    if mixture:
        order = _mixed_order(cursor, shuffle, mixture)
    elif shuffle:
        order = np.random.default_rng([cursor.seed % 2**64, cursor.epoch]).permutation(size)
    else:
        order = np.arange(size)
    deferred = np.array(cursor.deferred, dtype=np.int64)
    deferred = deferred[np.isin(deferred, order)]  # an epoch of a mixture may not contain them
    return np.concatenate([order[~np.isin(order, deferred)], deferred])


def _mixed_order(cursor: Cursor, shuffle: bool, mixture: Mixture) -> npt.NDArray[np.int64]:
    """Return the indices of an epoch's prompts, with the prompts of each set at even distances.

    Each set has its own permutation, of which successive epochs draw successive parts. If the parts do not divide the
    set, the last part wraps around; then the set gets a new permutation.
    """
    parts = []
    places = []
    for number, share in enumerate(mixture):
        round_, part = divmod(cursor.epoch, ceil(share.size / share.count))
        generator = np.random.default_rng([cursor.seed % 2**64, round_, number])
        order = generator.permutation(share.size) if shuffle else np.arange(share.size)
        start = part * share.count
        parts.append(share.first + order.take(range(start, start + share.count), mode="wrap"))
        places.append((np.arange(share.count) + 0.5) / share.count)
    return np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]


class PromptQueue:
    """Queue of prompts that are drawn but not used up. Ranks that make the same calls draw the same prompts."""

    def __init__(self, size: int, shuffle: bool, mixture: Mixture = ()) -> None:
        self._size = size
        self._shuffle = shuffle
        self._mixture = mixture
        self._draws: list[tuple[int, Cursor]] = []  # index of each prompt, and the cursor after it
        self._cursor = Cursor()
        self._is_skipped: Callable[[int], bool] = lambda _: False
        self._skips_left = 0
        self._step_size: int | None = None
        self._last: deque[int] = deque(maxlen=0)  # the last draws, used up or not

    def begin_step(self, cursor: Cursor, is_skipped: Callable[[int], bool], step_size: int | None) -> None:
        """Begin a step at `cursor`, where the last step ended or a run resumes.

        step_size: if prompts are drawn ahead, the number of consecutive draws that are distinct; None: the prompts in
        the queue are distinct. Prompts for which `is_skipped` is true are not drawn, up to one epoch's number of them
        per step.
        """
        self._cursor = cursor
        self._is_skipped = is_skipped
        self._skips_left = self._size
        if step_size != self._step_size:
            count = step_size - 1 if step_size else 0
            before = taken_before(cursor, self._size, count=count, shuffle=self._shuffle, mixture=self._mixture)
            self._step_size = step_size
            self._last = deque(before, maxlen=count)

    def __len__(self) -> int:
        return len(self._draws)

    def extend(self, count: int) -> None:
        """Draw prompts until the queue holds `count`."""
        while len(self._draws) < count:
            cursor = self._draws[-1][1] if self._draws else self._cursor
            recent = list(self._last) if self._step_size else [index for index, _ in self._draws]
            while True:
                (index,), cursor = take(
                    cursor, self._size, count=1, shuffle=self._shuffle, recent=recent, mixture=self._mixture
                )
                if not (self._is_skipped(index) and self._skips_left):
                    break
                self._skips_left -= 1
            self._draws.append((index, cursor))
            self._last.append(index)

    def __getitem__(self, number: int) -> int:
        self.extend(number + 1)
        return self._draws[number][0]

    def epoch(self, number: int) -> int:
        self.extend(number + 1)
        return self._draws[number][1].epoch

    def use_up(self, count: int) -> Cursor:
        """Remove the first `count` prompts from the queue; return the cursor at which the next step begins."""
        if count:
            self._cursor = self._draws[count - 1][1]
            self._draws = self._draws[count:]
        return self._cursor

    def give_back(self) -> None:
        """Empty the queue; the next draws repeat its prompts."""
        self._draws = []
