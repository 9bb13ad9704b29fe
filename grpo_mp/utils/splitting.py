"""Split a sequence into parts of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def split_by_size(items: Iterable[T], size_of: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items with a total size of at most `max_size`; a larger item gets its own list."""
    part = list[T]()
    total = 0
    for item in items:
        size = size_of(item)
        if part and total + size > max_size:
            yield part
            part = []
            total = 0
        part.append(item)
        total += size
    if part:
        yield part
