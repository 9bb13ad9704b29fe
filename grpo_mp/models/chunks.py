"""Positions of a slice of a flattened Megatron parameter in its Hugging Face tensors.

A distributed optimizer keeps a contiguous slice of each flattened parameter. In the Hugging Face tensors such a slice
is a few rectangles. Checkpoints store these rectangles, so that any layout can load what another layout saved.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from grpo_mp.models.mapping import Param, Run, Shape, shard_ranges, shard_runs


def matrix_shape(shape: Shape) -> Shape:
    """Return the shape in which chunks count a tensor: a vector, or a matrix whose columns are all further axes."""
    return (shape[0], prod(shape[1:])) if len(shape) > 2 else shape


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a Hugging Face tensor, seen in its `matrix_shape`.

    It is contiguous in the flattened Megatron shard, from index `start`.
    """

    tensor: int  # index in `Param.hf`
    offsets: Shape
    sizes: Shape
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.sizes)


def chunks_of(param: Param, tp_size: int, part: int, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks of elements [start, stop) of a flattened tensor-parallel shard; padding rows are skipped."""
    _, *rest = param.local_shape(tp_size)
    width = prod(rest)
    column = part * width if param.tp_dim == 1 else 0
    runs = list(_full_runs(param, tp_size if param.tp_dim == 0 else 1, part))
    first_rows = list(accumulate((run.rows for run in runs), initial=0))
    for row, count, first, last in _rectangles(start, stop, width):
        done = 0
        while done < count:
            index = bisect_right(first_rows, row + done) - 1
            tensor, hf_row, run = runs[index]
            skipped = row + done - first_rows[index]
            hf_row += skipped
            run = min(run - skipped, count - done)
            kept = min(run, param.shapes[tensor][0] - hf_row)  # rows beyond the vocabulary are padding
            if kept > 0:
                columns = ((column + first,), (last - first,)) if rest else ((), ())
                offset = (row + done) * width + first
                yield Chunk(tensor, (hf_row, *columns[0]), (kept, *columns[1]), offset)
            done += run


def _full_runs(param: Param, tp_size: int, part: int) -> Iterator[Run]:
    """Yield the runs of a shard's rows, with rows of the full Hugging Face tensors."""
    for tensor, row, count in shard_runs(param, tp_size):
        if tp_size == 1:
            yield Run(tensor, row, count)
            continue
        before = 0
        for start, stop in shard_ranges(param, tensor, tp_size, 0):
            if before <= row < before + stop - start:
                yield Run(tensor, start + part * (stop - start) + row - before, count)
            before += stop - start


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, rows, first column, last column) rectangles that cover a range of a row-major matrix."""
    while start < stop:
        row, first = divmod(start, width)
        full_rows = (stop - start) // width if first == 0 else 0
        count, last = (full_rows, width) if full_rows else (1, min(width, first + stop - start))
        yield row, count, first, last
        start += count * (last - first)
