"""Split a sequence into parts of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def split_by_size(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items, in order, in lists of a total size of at most `most`, or of a single larger item."""
    part = list[T]()
    total = 0
    for item in items:
        size = size_of(item)
        if part and total + size > most:
            yield part
            part = []
            total = 0
        part.append(item)
        total += size
    if part:
        yield part
