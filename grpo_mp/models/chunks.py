"""Positions of a slice of a flattened Megatron parameter in its Hugging Face tensors.

A distributed optimizer keeps a contiguous slice of each flattened parameter. In the Hugging Face tensors such a slice
is a few rectangles. Checkpoints store these rectangles, so that any layout can load what another layout saved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from grpo_mp.models.mapping import Param, Shape


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a Hugging Face tensor that is contiguous in the flattened Megatron shard, from index `start`."""

    tensor: int  # index in `Param.hf`
    offsets: Shape
    sizes: Shape
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.sizes)


def chunks_of(param: Param, tp_size: int, part: int, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks of elements [start, stop) of a flattened tensor-parallel shard; padding rows are skipped."""
    rows, *rest = param.local_shape(tp_size)
    width = rest[0] if rest else 1
    column = part * width if param.tp_dim == 1 else 0
    for row, count, first, last in _rectangles(start, stop, width):
        done = 0
        while done < count:
            tensor, hf_row, run = _locate(param, rows, tp_size, part, row + done)
            run = min(run, count - done)
            kept = min(run, param.shapes[tensor][0] - hf_row)  # rows beyond the vocabulary are padding
            if kept > 0:
                columns = ((column + first,), (last - first,)) if rest else ((), ())
                offset = (row + done) * width + first
                yield Chunk(tensor, (hf_row, *columns[0]), (kept, *columns[1]), offset)
            done += run


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, rows, first column, last column) rectangles that cover a range of a row-major matrix."""
    while start < stop:
        row, first = divmod(start, width)
        full_rows = (stop - start) // width if first == 0 else 0
        count, last = (full_rows, width) if full_rows else (1, min(width, first + stop - start))
        yield row, count, first, last
        start += count * (last - first)


def _locate(param: Param, rows: int, tp_size: int, part: int, row: int) -> tuple[int, int, int]:
    """Return (Hugging Face tensor, row in it, number of consecutive rows from there) of a shard's row."""
    divided = param.tp_dim == 0
    if param.fuse == "none":
        return 0, row + part * rows * divided, rows - row
    if param.fuse == "gate_up":
        half = rows // 2
        return row // half, row % half + part * half * divided, half - row % half
    queries, keys, _ = (shape[0] for shape in param.shapes)
    group_rows = (queries // keys * param.head_dim, param.head_dim, param.head_dim)
    groups = rows // sum(group_rows)
    group, rest = divmod(row, sum(group_rows))
    tensor = next(index for index in range(3) if rest < sum(group_rows[: index + 1]))
    rest -= sum(group_rows[:tensor])
    return tensor, (part * groups * divided + group) * group_rows[tensor] + rest, group_rows[tensor] - rest
