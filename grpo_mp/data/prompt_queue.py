"""The prompts of a run in launch order: drawn when they are needed, and ahead of the position that is saved."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from grpo_mp.data.cursor import Cursor, Mixture, take, taken_before


@dataclass(frozen=True)
class Draw:
    """A prompt's index, and where the next draw begins."""

    index: int
    cursor: Cursor


class PromptQueue:
    """Prompts that are drawn and not yet used up. Ranks that make the same calls draw the same prompts."""

    def __init__(self, size: int, shuffle: bool, mixture: Mixture = ()) -> None:
        """Take the number of prompts in an epoch, and whether they come in random order."""
        self._size, self._shuffle, self._mixture = size, shuffle, mixture
        self._draws: list[Draw] = []
        self._cursor = Cursor()
        self._is_skipped: Callable[[int], bool] = lambda _: False
        self._skips_left = 0
        self._step_size: int | None = None
        self._last: deque[int] = deque()  # what was drawn last, used up or not

    def begin_step(self, cursor: Cursor, is_skipped: Callable[[int], bool], step_size: int | None) -> None:
        """Begin a step at `cursor`, where the last one ended or a run resumes.

        No prompt is drawn twice for one step: among `step_size` prompts in a row where they are drawn ahead, at any
        time, or, None, among all that are drawn. No prompt that `is_skipped` is drawn in the step, unless those of
        nearly a whole epoch are.
        """
        self._cursor, self._is_skipped, self._skips_left = cursor, is_skipped, self._size
        if step_size != self._step_size:
            count = step_size - 1 if step_size else 0
            before = taken_before(cursor, self._size, count, self._shuffle, self._mixture)
            self._step_size, self._last = step_size, deque(before, maxlen=count)

    def __len__(self) -> int:
        return len(self._draws)

    def extend(self, count: int) -> None:
        """Draw until there are `count` prompts."""
        while len(self._draws) < count:
            cursor = self._draws[-1].cursor if self._draws else self._cursor
            recent = list(self._last) if self._step_size else [draw.index for draw in self._draws]
            (index,), cursor = take(cursor, self._size, 1, self._shuffle, recent, self._mixture)
            while self._is_skipped(index) and self._skips_left:
                self._skips_left -= 1
                (index,), cursor = take(cursor, self._size, 1, self._shuffle, recent, self._mixture)
            self._draws.append(Draw(index, cursor))
            if self._step_size:
                self._last.append(index)

    def __getitem__(self, number: int) -> int:
        """Return the index of the prompt with this number in the step's launch order."""
        self.extend(number + 1)
        return self._draws[number].index

    def epoch(self, number: int) -> int:
        """Return the epoch in which that prompt is drawn."""
        self.extend(number + 1)
        return self._draws[number].cursor.epoch

    def use_up(self, count: int) -> Cursor:
        """Drop the first `count` prompts; return where the next step begins."""
        if count:
            self._cursor = self._draws[count - 1].cursor
            self._draws = self._draws[count:]
        return self._cursor

    def give_back(self) -> None:
        """Drop what is drawn: the next step draws it again."""
        self._draws = []
