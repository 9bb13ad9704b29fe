"""The values of a metric over a run: the last one by one, all before in blocks. Bounded, whatever the run's length."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

BLOCK = 20  # values that a median is taken of
MOST_BLOCKS = 64  # then two become one


@dataclass(frozen=True)
class Block:
    """Values of a metric that follow each other: the step in their middle, their median, how many came till then.

    What is not finite is no value here.
    """

    step: int
    value: float
    count: int


@dataclass(frozen=True)
class Past:
    """What a metric was: means or medians of stretches, each with a step: a mean's last, the middle of a block."""

    steps: Sequence[int]
    values: Sequence[float]

    def place_of(self, step: int) -> int:
        """Return the place of the stretch nearest to a step."""
        return min(range(len(self.steps)), key=lambda place: abs(self.steps[place] - step))


class History:
    """What a metric was, step by step.

    A block's median is not moved by a spike, and the blocks reach back to the start of the run: by them a change shows
    that is too slow for the last values. The first block is kept as it is, others are averaged as they become more.
    """

    def __init__(self, memory: int) -> None:
        """Remember the last `memory` values one by one."""
        self._last = deque[float](maxlen=memory)  # as they came, NaN among them
        self._finite = deque[tuple[int, float]](maxlen=memory)  # with their steps
        self._count = 0
        self._block: list[tuple[int, float]] = []  # to come, with steps
        self._medians: list[Block] = []  # that become one block
        self._closed: list[Block] = []  # that became the last one
        self._per_block = 1  # medians
        self._start: Block | None = None
        self.blocks: list[Block] = []
        self._before: dict[tuple[int, int, bool], Past] = {}  # what was asked since the last value

    @classmethod
    def of(cls, values: Iterable[float]) -> "History":
        """Return the history of values, one a step from step 1 on, with all of them in memory."""
        listed = list(values)
        history = cls(max(1, len(listed)))
        for step, value in enumerate(listed, 1):
            history.add(step, value)
        return history

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self._last.append(value)
        self._before.clear()
        if not math.isfinite(value):
            return
        self._finite.append((step, value))
        self._count += 1
        self._block.append((step, value))
        if len(self._block) == BLOCK:
            middle = (self._block[0][0] + step) // 2
            self._medians.append(Block(middle, median(value for _, value in self._block), self._count))
            self._start = self._start or self._medians[0]
            self._block.clear()
            self._add_block()

    def _add_block(self) -> None:
        if len(self._medians) < self._per_block:
            return
        middle = (self._medians[0].step + self._medians[-1].step) // 2
        self.blocks.append(Block(middle, mean([one.value for one in self._medians]), self._count))
        self._closed, self._medians = self._medians, []
        if len(self.blocks) == MOST_BLOCKS:
            self._closed.insert(0, self.blocks[-2])
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
            self.blocks = [
                Block((one.step + two.step) // 2, mean((one.value, two.value)), two.count) for one, two in pairs
            ]
            self._per_block *= 2

    def last(self, number: int) -> list[float]:
        """Return the last values as they came, at most `number`, the oldest first."""
        return list(islice(self._last, max(0, len(self._last) - number), None))

    def last_finite(self, number: int) -> list[float]:
        """Return the last finite values, at most `number`, the oldest first."""
        return [value for _, value in islice(self._finite, max(0, len(self._finite) - number), None)]

    def before(self, length: int, within: int, whole_run: bool) -> Past:
        """Return what was before the last `length` finite values, the oldest first.

        Means of `length` values at most `within` values before these; where `whole_run` all blocks before, too.
        """
        key = length, within, whole_run
        if key not in self._before:
            self._before[key] = self._look_back(*key)
        return self._before[key]

    def _look_back(self, length: int, within: int, whole_run: bool) -> Past:
        blocks = [block for block in (self._start, *self._all_blocks(length)) if block is not None] if whole_run else []
        blocks = [block for block in blocks if block.count <= self._count - length]
        kept = list(self._finite)[-length - within :]
        steps, values = [block.step for block in blocks], [block.value for block in blocks]
        if len(kept) >= 2 * length:
            windows = sliding_window_view(np.array([value for _, value in kept[:-length]]), length)
            with np.errstate(over="ignore"):
                values += windows.mean(axis=1).tolist()
            steps += [step for step, _ in kept[length - 1 : -length]]
        return Past(steps, values)

    def _all_blocks(self, length: int) -> list[Block]:
        """Return the blocks, and the medians still to become one; of a last block that reaches too far its medians."""
        reaches = bool(self.blocks) and self.blocks[-1].count > self._count - length
        return [*(self.blocks[:-1] if reaches else self.blocks), *(self._closed if reaches else ()), *self._medians]

    def nearest(self, step: int, within: int) -> float | None:
        """Return the value of about a step: a single one of the last `within`, or a block's; None without any."""
        past = self.before(1, within, whole_run=True)
        return past.values[past.place_of(step)] if past.values else None


def mean(values: Sequence[float]) -> float:
    """Return the mean, which may be not finite: unlike fmean's, it is no error for infinities of both signs."""
    return sum(values) / len(values)


def noise_of(values: Sequence[float]) -> float:
    """Return the standard deviation of values about what they follow, estimated from the changes between neighbours.

    A trend or one jump hardly changes it. J. von Neumann, Annals of Mathematical Statistics 12 (1941).
    """
    changes = [abs(after - before) for before, after in pairwise(values)]
    return mean(changes) * math.sqrt(math.pi) / 2 if changes else 0.0


def creeps(values: Sequence[float], share: float) -> bool:
    """Return whether values rise by this share, and by half an even part of that in each third of them."""
    third = len(values) // 3
    ends = [mean(values[end : end + 1 + third // 4]) for end in (0, third, 2 * third)] + [values[-1]]
    rises = [after - before for before, after in pairwise(ends)]
    return sum(rises) > share * abs(ends[0]) and all(rise > sum(rises) / 6 for rise in rises)
