"""Rectangles of Hugging Face tensors in files: each rank writes its own and reads any that other ranks wrote.

A folder holds one file of raw bytes per rank and an index, written last, of where each rectangle lies. So any layout
loads what any layout saved, no rank gathers a tensor, and values keep their dtype. Ranks write independently, in a
background thread if need be.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mp.platform.pinned import PinnedBuffer
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import sync_to_disk
from grpo_mp.utils.reading import read_json

INDEX = "chunks.json"
PAGE_BYTES = 4096  # a disk reads no less
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunk:
    """A rectangle of one Hugging Face tensor, a vector or matrix. `tensor` views this rank's memory."""

    name: str  # exp_avg/model.norm.weight
    shape: Shape  # of the Hugging Face tensor
    offsets: Shape
    tensor: Tensor
    is_replica: bool  # another rank saves the same


@dataclass(frozen=True)
class StoredPiece:
    """Where some rows of a chunk lie: `sizes` elements from byte `start` of a file."""

    file: str
    start: int
    offsets: Shape  # in the Hugging Face tensor
    sizes: Shape


@dataclass(frozen=True)
class StoredTensor:
    """The pieces of one Hugging Face tensor."""

    shape: Shape
    dtype: torch.dtype
    pieces: list[StoredPiece]


WrittenChunks = dict[str, StoredTensor]  # by name


class ChunkWriter:
    """Writes one rank's chunks, except replicas. To `write` in a background thread, call `share_buffer` first."""

    def __init__(self, folder: Path, rank: int, chunks: Iterable[TensorChunk], piece_bytes: int) -> None:
        """Make the folder. The chunks' tensors must not change until `write` returns."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._file = folder, folder / f"rank_{rank:05d}.bin"
        self._pieces = [piece for chunk in chunks if not chunk.is_replica for piece in _pieces(chunk, piece_bytes)]
        on_device = [piece.tensor.nbytes for piece in self._pieces if piece.tensor.device.type != "cpu"]
        self.staged_bytes = max(on_device, default=0)
        self.buffer: PinnedBuffer | None = None  # of `staged_bytes` or more

    def write(self) -> WrittenChunks:
        """Write the chunks to disk; return where they are."""
        if self.buffer is None:
            share_buffer([self])
        written: WrittenChunks = {}
        with self._file.open("wb") as stream:
            for piece in self._pieces:
                stored = StoredTensor(piece.shape, piece.tensor.dtype, [])
                place = StoredPiece(self._file.name, stream.tell(), piece.offsets, tuple(piece.tensor.shape))
                written.setdefault(piece.name, stored).pieces.append(place)
                stream.write(memory_of(self._on_host(piece.tensor)))
            stream.flush()
            os.fsync(stream.fileno())
        return written

    def _on_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        assert self.buffer
        host = self.buffer.tensors[0][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return host.copy_(tensor)


def share_buffer(writers: Sequence[ChunkWriter]) -> list[ChunkWriter]:
    """Make one pinned buffer for writers that write one after the other, and return them.

    A background thread must not allocate it: there the current GPU would be the first one.
    """
    size = max(writer.staged_bytes for writer in writers)
    buffer = PinnedBuffer([torch.empty(size, dtype=torch.uint8, device="meta")])
    for writer in writers:
        writer.buffer = buffer
    return list(writers)


def write_index(folder: Path, written: Iterable[WrittenChunks]) -> None:
    """Make a folder readable once all ranks have written: write its index."""
    index: dict[str, Any] = {}
    for name, stored in (item for by_rank in written for item in by_rank.items()):
        entry = {"shape": stored.shape, "dtype": str(stored.dtype).removeprefix("torch."), "pieces": []}
        index.setdefault(name, entry)["pieces"] += [list(vars(piece).values()) for piece in stored.pieces]
    (folder / INDEX).write_text(json.dumps(index))
    sync_to_disk(folder / INDEX)


def read_index(folder: Path) -> Mapping[str, StoredTensor]:
    """Return the stored tensors of a folder by name."""
    try:
        return {
            name: StoredTensor(
                tuple(entry["shape"]),
                getattr(torch, entry["dtype"]),
                [StoredPiece(file, start, tuple(at), tuple(sizes)) for file, start, at, sizes in entry["pieces"]],
            )
            for name, entry in read_json(folder / INDEX).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is damaged: copy it again") from error


def read_chunks(chunks: Iterable[TensorChunk], folder: Path, piece_bytes: int) -> None:
    """Fill this rank's chunks from what any layout saved, through at most `piece_bytes` of host memory, or one row.

    Only the needed bytes are read, and gaps of less than a page between rows.
    """
    index = read_index(folder)
    overlaps = [overlap for chunk in chunks for overlap in _overlaps(chunk, index, folder)]
    overlaps.sort(key=lambda overlap: (overlap.piece.file, overlap.piece.start))
    with ExitStack() as stack:
        files: dict[str, FileIO] = {}
        for overlap in overlaps:
            name = overlap.piece.file
            if name not in files:
                files[name] = stack.enter_context((folder / name).open("rb", buffering=0))
            overlap.read(files[name], piece_bytes)


@dataclass(frozen=True)
class _Overlap:
    """The part of a stored piece that a chunk needs: rows and columns of either; a vector is a matrix of one column."""

    piece: StoredPiece
    dtype: torch.dtype
    rows: range  # of the piece
    columns: range
    target: Tensor  # [rows, columns] of the chunk

    def read(self, stream: FileIO, strip_bytes: int) -> None:
        """Fill the target, a strip of rows at a time."""
        width = self.piece.sizes[1] if len(self.piece.sizes) > 1 else 1
        itemsize, columns = self.dtype.itemsize, self.columns
        if len(self.rows) > 1 and (width - len(columns)) * itemsize < PAGE_BYTES:
            columns = range(width)  # one read for many rows
        count = max(1, strip_bytes // max(1, len(columns) * itemsize))
        strip = torch.empty(min(count, len(self.rows)), len(columns), dtype=self.dtype)
        for done in range(0, len(self.rows), count):
            part = strip[: len(self.rows) - done]
            first = self.rows[done] * width + columns.start
            reads = [part] if len(columns) == width else list(part)
            for number, memory in enumerate(reads):
                place = self.piece.start + (first + number * width) * itemsize
                if not read_at(stream, place, memory_of(memory)):
                    raise UserError(f"{stream.name} is cut short: copy it again")
            shift = self.columns.start - columns.start
            self.target[done : done + count].copy_(part[:, shift : shift + len(self.columns)])


def _overlaps(chunk: TensorChunk, index: Mapping[str, StoredTensor], folder: Path) -> list[_Overlap]:
    """Return the parts of stored pieces that make up a chunk."""
    stored, found = index.get(chunk.name), list[_Overlap]()
    matrix = chunk.tensor.view(-1, 1) if chunk.tensor.dim() == 1 else chunk.tensor
    for piece in stored.pieces if stored and stored.shape == chunk.shape else ():
        bounds = [
            (max(start, other), min(start + size, other + other_size))
            for start, size, other, other_size in zip(
                chunk.offsets, chunk.tensor.shape, piece.offsets, piece.sizes, strict=True
            )
        ]
        if stored and all(start < stop for start, stop in bounds):
            (rows, own_rows), *columns = [
                (range(start - at, stop - at), slice(start - own, stop - own))
                for (start, stop), at, own in zip(bounds, piece.offsets, chunk.offsets, strict=True)
            ]
            of_row, own_columns = columns[0] if columns else (range(1), slice(0, 1))
            found.append(_Overlap(piece, stored.dtype, rows=rows, columns=of_row, target=matrix[own_rows, own_columns]))
    if sum(overlap.target.numel() for overlap in found) != chunk.tensor.numel():
        raise UserError(
            f"{folder}: the checkpoint lacks {chunk.name} {list(chunk.shape)} or a part of it: it is another model's, "
            "another optimizer's, or of another version of grpo_mp"
        )
    return found


def _pieces(chunk: TensorChunk, piece_bytes: int) -> Iterator[TensorChunk]:
    """Cut a chunk into rows of `piece_bytes` at most, or one row."""
    rows = max(1, piece_bytes // max(1, chunk.tensor[:1].nbytes))
    for start in range(0, len(chunk.tensor), rows):
        offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
        yield replace(chunk, offsets=offsets, tensor=chunk.tensor[start : start + rows])


def memory_of(tensor: Tensor) -> memoryview:
    """Return the writable bytes of a contiguous tensor of the host."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def read_at(stream: FileIO, place: int, memory: memoryview) -> bool:
    """Fill `memory` from a place in a file; return whether the file holds that much."""
    while memory and (count := os.preadv(stream.fileno(), [memory], place)):
        memory, place = memory[count:], place + count
    return not memory


@dataclass(frozen=True)
class SavedTensors:
    """Reads whole tensors of a folder."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str, shape: Shape) -> Tensor:
        """Return a tensor; refuse a folder that lacks it or has it in another shape."""
        tensor = torch.empty(shape, dtype=self.dtype(name))
        chunk = TensorChunk(name, shape, (0,) * len(shape), tensor, is_replica=False)
        for overlap in _overlaps(chunk, self.tensors, self.folder):
            with (self.folder / overlap.piece.file).open("rb", buffering=0) as stream:
                overlap.read(stream, tensor.nbytes)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        if name not in self.tensors:
            raise UserError(f"{self.folder}: the tensor {name} is missing: it is of another model")
        return self.tensors[name].dtype
