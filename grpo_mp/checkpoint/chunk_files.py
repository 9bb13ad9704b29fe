"""Rectangles of Hugging Face tensors as files: each rank writes its own, and reads any from those that others wrote.

By torch's distributed checkpoint, which reads any rectangles from any others: so any layout loads what any layout
saved, no rank gathers anything, and nothing is widened. Writing needs no other rank, so it may go on in a thread; the
index, `.metadata`, is written last, from what all ranks have written.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from grpo_mp.checkpoint.safe_metadata import SafeReader, read_metadata
from grpo_mp.checkpoint.torch_dist_reader import find_elements, memory_of, read_at
from grpo_mp.platform.pinned import PinnedBuffer
from grpo_mp.utils.errors import UserError, one_line

PAGE_BYTES = 4096  # a disk reads no less
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunk:
    """A rectangle of one Hugging Face tensor: `tensor` is a view of what this rank keeps."""

    name: str  # of what is kept and of the Hugging Face tensor: exp_avg/model.norm.weight
    shape: tuple[int, ...]  # of the Hugging Face tensor
    offsets: tuple[int, ...]
    tensor: Tensor
    is_replica: bool  # another rank keeps and saves the same

    @property
    def index(self) -> MetadataIndex:
        """Return its key in torch's plans."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def storage(self) -> ChunkStorageMetadata:
        """Return its place in the Hugging Face tensor."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


@dataclass(frozen=True)
class WrittenChunks:
    """What one rank has written into a folder."""

    plan: SavePlan
    results: list[WriteResult]


class ChunkWriter:
    """Writes one rank's chunks that are no replicas, a piece at a time.

    `write` in another thread than the loop's needs `share_buffer` before.
    """

    def __init__(self, folder: Path, rank: int, chunks: Iterable[TensorChunk], piece_bytes: int) -> None:
        """Take the chunks, whose tensors must stay as they are until `write` returns; makes the folder."""
        pieces = [piece for chunk in chunks if not chunk.is_replica for piece in _pieces(chunk, piece_bytes)]
        self.folder = folder
        self._planner = _ChunkSavePlanner(pieces)
        self._writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # one piece at a time
        self._writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
        self._plan = self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self) -> WrittenChunks:
        """Write them; no other rank need be there."""
        if self._planner.buffer is None:
            share_buffer([self])
        return WrittenChunks(self._plan, self._writer.write_data(self._plan, self._planner).wait())


def share_buffer(writers: Sequence[ChunkWriter]) -> list[ChunkWriter]:
    """Make one pinned buffer for writers that write one after the other, and return them.

    It lives as long as they do. In a thread that writes, it would be made for another GPU, the first.
    """
    size = max(writer._planner.staged_bytes for writer in writers)
    buffer = PinnedBuffer([torch.empty(size, dtype=torch.uint8, device="meta")])
    for writer in writers:
        writer._planner.buffer = buffer
    return list(writers)


def write_index(folder: Path, written: Sequence[WrittenChunks]) -> None:
    """Make what all ranks have written into a folder readable: write its index."""
    _, metadata = create_default_global_save_plan([one.plan for one in written])
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [one.results for one in written])


def read_chunks(chunks: Iterable[TensorChunk], folder: Path, piece_bytes: int) -> None:
    """Fill this rank's chunks from what any layout saved, through `piece_bytes` of memory at most, or one row.

    No more is read than the chunks are, but for gaps between rows of less than a page.
    Raises UserError where a part of one is missing, or the folder is damaged.
    """
    read_metadata(folder)  # its errors are sentences, which torch would replace by its own
    with _one_sentence(folder):
        planner = _ChunkLoadPlanner(chunks, folder)
        dcp.load({}, storage_reader=_RectangleReader(folder, piece_bytes), planner=planner, no_dist=True)


@contextmanager
def _one_sentence(folder: Path) -> Iterator[None]:
    """Raise as UserError what torch collects with a stack trace."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, UserError):
            raise cause from error
        raise UserError(f"{folder}: the checkpoint cannot be read: {one_line(cause)}") from error


def _pieces(chunk: TensorChunk, piece_bytes: int) -> Iterator[TensorChunk]:
    """Cut a chunk into rows of `piece_bytes` at most, or one row."""
    rows = max(1, piece_bytes // max(1, chunk.tensor[:1].nbytes))
    for start in range(0, len(chunk.tensor), rows):
        offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
        yield replace(chunk, offsets=offsets, tensor=chunk.tensor[start : start + rows])


class _ChunkSavePlanner(SavePlanner):
    """Saves pieces as they are, from the memory that they are in; those of a device through one buffer."""

    buffer: PinnedBuffer | None  # of `staged_bytes` or more

    def __init__(self, pieces: Iterable[TensorChunk]) -> None:
        self._pieces = {piece.index: piece for piece in pieces}
        on_device = [piece.tensor.nbytes for piece in self._pieces.values() if piece.tensor.device.type != "cpu"]
        self.staged_bytes, self.buffer = max(on_device, default=0), None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        piece.storage, TensorProperties.create_from_tensor(piece.tensor), torch.Size(piece.shape)
                    ),
                )
                for index, piece in self._pieces.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor = self._pieces[write_item.index].tensor
        return _with_own_storage(tensor if tensor.device.type == "cpu" else self._on_host(tensor))

    def _on_host(self, tensor: Tensor) -> Tensor:
        assert self.buffer
        host = self.buffer.tensors[0][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return host.copy_(tensor)


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that is all of its storage.

    torch copies any other to save it, and the copies of several pieces then wait for the garbage collector.
    """
    return torch.from_numpy(_as_bytes(tensor).numpy()).view(tensor.dtype).view(tensor.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class _RectangleReader(SafeReader):
    """Reads rectangles of pieces: into their place where that is memory of the host, else through a strip of rows."""

    def __init__(self, folder: Path, strip_bytes: int) -> None:
        super().__init__(folder)
        self._strip_bytes = strip_bytes

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = sorted(plan.items, key=lambda item: self._place(item)[:2])
        for place, parts in groupby(items, key=self._place):
            self._read_piece(place, list(parts), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> tuple[str, int, int]:
        info = self.storage_data[item.storage_index]
        return info.relative_path, info.offset, info.length

    def _read_piece(self, place: tuple[str, int, int], items: list[ReadItem], planner: LoadPlanner) -> None:
        saved, number = self._tensors[items[0].storage_index.fqn], items[0].storage_index.index
        assert isinstance(saved, TensorStorageMetadata)
        assert number is not None  # create_read_items_for_chunk_list sets it
        (name, start, length), sizes, dtype = place, tuple(saved.chunks[number].sizes), saved.properties.dtype
        file = Path(self.path) / name
        with file.open("rb", buffering=0) as stream:
            elements = find_elements(stream, start, length, sizes, dtype.itemsize)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                if elements is None or not self._read(_Piece(stream, elements, sizes, dtype), item, target):
                    raise UserError(f"{file}: a piece of {item.storage_index.fqn} is damaged: copy it again")

    def _read(self, piece: "_Piece", item: ReadItem, target: Tensor) -> bool:
        """Read an item; tell whether all of it is there."""
        (first, *corner), lengths = item.storage_offsets, item.lengths
        rows, before = piece.rows_as_read(lengths[0], tuple(corner), tuple(lengths[1:]))
        whole = rows == tuple(lengths[1:])
        if whole and target.device.type == "cpu" and target.dtype == piece.dtype and target.is_contiguous():
            # By a view of its own: of a dimension of one row, a contiguous tensor may have any stride.
            return piece.read(target.view(-1).view(lengths), first, before)
        count = max(1, self._strip_bytes // max(1, prod(rows) * piece.dtype.itemsize))
        strip = torch.empty((min(count, lengths[0]), *rows), dtype=piece.dtype)
        for done in range(0, lengths[0], count):
            part = strip[: lengths[0] - done]
            if not piece.read(part, first + done, before):
                return False
            for dim, (wanted, has) in enumerate(zip(corner, before, strict=True), start=1):
                part = part.narrow(dim, wanted - has, lengths[dim])
            target[done : done + count].copy_(part)
        return True


@dataclass(frozen=True)
class _Piece:
    """A piece in a file: its elements lie one after the other from `elements` on."""

    stream: FileIO
    elements: int
    sizes: Shape
    dtype: torch.dtype

    def rows_as_read(self, count: int, corner: Shape, lengths: Shape) -> tuple[Shape, Shape]:
        """Return sizes and offsets of what is read of each of `count` rows, of which a rectangle is wanted.

        That is a range of the row's first dimension, or all of it where the gaps to the next row have no whole page.
        """
        row = self.sizes[1:]
        if not row or (count > 1 and (row[0] - lengths[0]) * prod(row[1:]) * self.dtype.itemsize < PAGE_BYTES):
            return row, (0,) * len(row)
        return (lengths[0], *row[1:]), (corner[0], *(0 for _ in row[1:]))

    def read(self, out: Tensor, first: int, before: Shape) -> bool:
        """Fill `out`, contiguous, with rows from `first` on, each from `before` on; tell whether they are there."""
        memory, row = memory_of(out), self.sizes[1:]
        row_bytes, at = prod(row) * self.dtype.itemsize, self.elements
        at += first * row_bytes
        if tuple(out.shape[1:]) == row:
            return read_at(self.stream, at, memory)
        at += before[0] * prod(row[1:]) * self.dtype.itemsize
        size = len(memory) // len(out)
        return all(
            read_at(self.stream, at + number * row_bytes, memory[number * size : (number + 1) * size])
            for number in range(len(out))
        )


class _ChunkLoadPlanner(LoadPlanner):
    """Reads the chunks of this rank from those that were saved; two may be of the same place (tied embeddings)."""

    def __init__(self, chunks: Iterable[TensorChunk], folder: Path) -> None:
        self._chunks, self._folder = defaultdict[str, list[TensorChunk]](list), folder
        for chunk in chunks:
            self._chunks[chunk.name].append(chunk)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, chunks in self._chunks.items() for item in self._read_items(name, chunks)])

    def _read_items(self, name: str, chunks: list[TensorChunk]) -> list[ReadItem]:
        saved, shape = self._saved.get(name), chunks[0].shape
        items = (
            create_read_items_for_chunk_list(name, saved, [chunk.storage for chunk in chunks])
            if isinstance(saved, TensorStorageMetadata) and tuple(saved.size) == shape
            else []
        )
        if sum(prod(item.lengths) for item in items) != sum(chunk.tensor.numel() for chunk in chunks):
            raise UserError(
                f"{self._folder}: the checkpoint lacks {name} {list(shape)} or a part of it: it is another model's, "
                "another optimizer's, or of another version of grpo_mp"
            )
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint's pieces are tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        number = read_item.dest_index.index
        assert number is not None  # the position in the list that the items were made for
        tensor = self._chunks[read_item.dest_index.fqn][number].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
