"""Files of rectangles of Hugging Face tensors: each rank writes its own rectangles and can read those of all ranks.

A folder has one file of raw bytes per rank, and an index of all rectangles, which is written last. So any layout can
load the checkpoint of any other, no rank gathers a tensor, and values keep their dtype. Ranks write independently, and
can write in a background thread.
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
PIECE_BYTES = 2**30  # host memory of a rank for saving and loading: tensors are copied in pieces of this size
WEIGHT = "weight"  # prefix of weights, as in weight/model.norm.weight
OPTIMIZER_FOLDER = "optimizer"  # folder of the optimizer state, inside the folder of the weights
PAGE_BYTES = 4096  # smallest read of a disk
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunk:
    """Rectangle of one Hugging Face tensor (a vector or matrix) in this rank's memory."""

    name: str  # kind and Hugging Face name, such as exp_avg/model.norm.weight
    shape: Shape  # of the Hugging Face tensor
    offsets: Shape  # of the rectangle in the Hugging Face tensor
    tensor: Tensor  # view of this rank's memory
    is_replica: bool  # True: another rank saves this rectangle


@dataclass(frozen=True)
class StoredPiece:
    """Location of some rows of a chunk in a file: a rectangle of shape `sizes`, from byte `start` on."""

    file: str
    start: int
    offsets: Shape  # in the Hugging Face tensor
    sizes: Shape


@dataclass(frozen=True)
class StoredTensor:
    """Stored pieces of one Hugging Face tensor."""

    shape: Shape  # of the Hugging Face tensor
    dtype: torch.dtype
    pieces: list[StoredPiece]


WrittenChunks = dict[str, StoredTensor]  # by name


class ChunkWriter:
    """Writes one rank's chunks, except replicas. To `write` in a background thread, call `share_buffer` first."""

    def __init__(self, folder: Path, rank: int, chunks: Iterable[TensorChunk]) -> None:
        """Create the folder. The chunks' tensors must not change until `write` returns."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = folder / f"rank_{rank:05d}.bin"
        self._pieces = [piece for chunk in chunks if not chunk.is_replica for piece in _pieces(chunk)]
        on_device = [piece.tensor.nbytes for piece in self._pieces if piece.tensor.device.type != "cpu"]
        self.staged_bytes = max(on_device, default=0)
        self.buffer: PinnedBuffer | None = None  # has at least `staged_bytes`

    def write(self) -> WrittenChunks:
        """Write the chunks to disk and return their locations."""
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
    """Allocate one pinned buffer for writers that run one after the other, and return the writers.

    A background thread must not allocate it, because the thread's current GPU is always GPU 0.
    """
    size = max(writer.staged_bytes for writer in writers)
    buffer = PinnedBuffer([torch.empty(size, dtype=torch.uint8, device="meta")])
    for writer in writers:
        writer.buffer = buffer
    return list(writers)


def write_index(folder: Path, written: Iterable[WrittenChunks]) -> None:
    """Write the index of a folder after all ranks have written. `written`: the chunks of each rank."""
    index: dict[str, Any] = {}
    for name, stored in (item for by_rank in written for item in by_rank.items()):
        entry = {"shape": stored.shape, "dtype": str(stored.dtype).removeprefix("torch."), "pieces": []}
        index.setdefault(name, entry)["pieces"] += [list(vars(piece).values()) for piece in stored.pieces]
    (folder / INDEX).write_text(json.dumps(index))
    sync_to_disk(folder / INDEX)


def read_index(folder: Path) -> Mapping[str, StoredTensor]:
    """Return the stored tensors of a folder by chunk name, from its index."""
    index: dict[str, StoredTensor] = {}
    for name, entry in read_json(folder / INDEX).items():
        pieces = [StoredPiece(file, at, tuple(offsets), tuple(sizes)) for file, at, offsets, sizes in entry["pieces"]]
        index[name] = StoredTensor(tuple(entry["shape"]), getattr(torch, entry["dtype"]), pieces)
    return index


def read_chunks(chunks: Iterable[TensorChunk], folder: Path) -> None:
    """Fill the tensors of `chunks` from a folder that any layout saved.

    The read buffer in host memory has PIECE_BYTES, but at least one row. Only the needed bytes are read, and gaps
    between rows if they are smaller than a page.
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
            overlap.read(files[name], PIECE_BYTES)


@dataclass(frozen=True)
class _Overlap:
    """Intersection of a stored piece and a chunk. A vector counts as a matrix of one column."""

    piece: StoredPiece
    dtype: torch.dtype  # of the stored piece
    rows: range  # of the piece
    columns: range  # of the piece
    target: Tensor  # view [rows, columns] of the chunk's tensor

    def read(self, stream: FileIO, strip_bytes: int) -> None:
        """Read the target from the file, in strips of rows of at most `strip_bytes`, or one row."""
        width = self.piece.sizes[1] if len(self.piece.sizes) > 1 else 1
        itemsize = self.dtype.itemsize
        columns = self.columns
        if len(self.rows) > 1 and (width - len(columns)) * itemsize < PAGE_BYTES:
            columns = range(width)  # reading whole rows needs one read for many rows
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
    """Return the intersections of a chunk with the stored pieces; refuse a folder where they do not cover it."""
    stored = index.get(chunk.name)
    found = list[_Overlap]()
    matrix = chunk.tensor.view(-1, 1) if chunk.tensor.dim() == 1 else chunk.tensor
    first_row, first_column = (*chunk.offsets, 0)[:2]
    for piece in stored.pieces if stored and stored.shape == chunk.shape else ():
        row, column = (*piece.offsets, 0)[:2]
        height, width = (*piece.sizes, 1)[:2]
        top = max(first_row, row)
        left = max(first_column, column)
        bottom = min(first_row + matrix.shape[0], row + height)
        right = min(first_column + matrix.shape[1], column + width)
        if stored and top < bottom and left < right:
            target = matrix[top - first_row : bottom - first_row, left - first_column : right - first_column]
            rows = range(top - row, bottom - row)
            columns = range(left - column, right - column)
            found.append(_Overlap(piece, stored.dtype, rows=rows, columns=columns, target=target))
    if sum(overlap.target.numel() for overlap in found) != chunk.tensor.numel():
        raise UserError(
            f"{folder}: the checkpoint lacks {chunk.name} {list(chunk.shape)} or a part of it: it is another model's, "
            "another optimizer's, or of another version of grpo_mp"
        )
    return found


def _pieces(chunk: TensorChunk) -> Iterator[TensorChunk]:
    """Split a chunk into groups of rows of at most PIECE_BYTES, or one row."""
    rows = max(1, PIECE_BYTES // max(1, chunk.tensor[:1].nbytes))
    for start in range(0, len(chunk.tensor), rows):
        offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
        yield replace(chunk, offsets=offsets, tensor=chunk.tensor[start : start + rows])


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def read_at(stream: FileIO, place: int, memory: memoryview) -> bool:
    """Fill `memory` from byte `place` of a file; return False if the file ends before."""
    while memory and (count := os.preadv(stream.fileno(), [memory], place)):
        memory = memory[count:]
        place = place + count
    return not memory


def read_tensor(name: str, shape: Shape, folder: Path, index: Mapping[str, StoredTensor]) -> Tensor:
    """Return a full tensor from a folder; refuse a folder that does not have it in this shape."""
    if name not in index:
        raise UserError(f"{folder}: the tensor {name} is missing: it is of another model")
    tensor = torch.empty(shape, dtype=index[name].dtype)
    chunk = TensorChunk(name, shape, (0,) * len(shape), tensor, is_replica=False)
    for overlap in _overlaps(chunk, index, folder):
        with (folder / overlap.piece.file).open("rb", buffering=0) as stream:
            overlap.read(stream, tensor.nbytes)
    return tensor
