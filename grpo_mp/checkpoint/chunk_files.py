"""Rectangles of Hugging Face tensors as files: each rank writes its own, and reads any from those that others wrote.

By torch's distributed checkpoint, which reads any rectangles from any others: so any layout loads what any layout
saved, no rank gathers anything, and nothing is widened. Writing needs no other rank, so it may go on in a thread; the
index, `.metadata`, is written last, from what all ranks have written.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
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
from grpo_mp.checkpoint.torch_dist_reader import read_into
from grpo_mp.errors import UserError, one_line
from grpo_mp.platform.pinned import PinnedBuffer


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
    """Writes one rank's chunks that are no replicas, a piece at a time."""

    def __init__(self, folder: Path, rank: int, chunks: Iterable[TensorChunk], piece_bytes: int) -> None:
        """Take the chunks, whose tensors must stay as they are until `write` returns; makes the folder."""
        pieces = [piece for chunk in chunks if not chunk.is_replica for piece in _pieces(chunk, piece_bytes)]
        self.folder = folder
        self._planner = _ChunkSavePlanner(pieces)
        # One piece at a time. Files are synced when their checksums are taken.
        self._writer = dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
        self._writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
        self._plan = self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self) -> WrittenChunks:
        """Write them; no other rank need be there."""
        return WrittenChunks(self._plan, self._writer.write_data(self._plan, self._planner).wait())


def write_index(folder: Path, written: Sequence[WrittenChunks]) -> None:
    """Make what all ranks have written into a folder readable: write its index."""
    _, metadata = create_default_global_save_plan([one.plan for one in written])
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [one.results for one in written])


def read_chunks(chunks: Iterable[TensorChunk], folder: Path) -> None:
    """Fill this rank's chunks from what any layout saved, and read no more than the pieces that they are parts of.

    Raises UserError where a part of one is missing, or the folder is damaged.
    """
    read_metadata(folder)  # its errors are sentences, which torch would replace by its own
    with _one_sentence(folder):
        planner = _ChunkLoadPlanner(chunks, folder)
        dcp.load({}, storage_reader=_PieceReader(folder), planner=planner, no_dist=True)


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
    """Cut a chunk into rows of `piece_bytes` at most, or one row: who reads a part of a piece holds all of it."""
    rows = max(1, piece_bytes // max(1, chunk.tensor[:1].nbytes))
    for start in range(0, len(chunk.tensor), rows):
        offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
        yield replace(chunk, offsets=offsets, tensor=chunk.tensor[start : start + rows])


class _ChunkSavePlanner(SavePlanner):
    """Saves pieces as they are, from the memory that they are in; those of a device through one buffer."""

    def __init__(self, pieces: Iterable[TensorChunk]) -> None:
        self._pieces = {piece.index: piece for piece in pieces}
        on_device = [piece.tensor.nbytes for piece in self._pieces.values() if piece.tensor.device.type != "cpu"]
        # Made here: in a thread that writes, pinned memory would be made for another GPU, the first.
        self._pinned = PinnedBuffer([torch.empty(max(on_device, default=0), dtype=torch.uint8, device="meta")])
        (self._buffer,) = self._pinned.tensors

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
        host = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return host.copy_(tensor)


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that is all of its storage.

    torch copies any other to save it, and the copies of several pieces then wait for the garbage collector.
    """
    return torch.from_numpy(_as_bytes(tensor).numpy()).view(tensor.dtype).view(tensor.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class _PieceReader(SafeReader):
    """Reads each piece once: into its place where all of it goes there, else through memory of one piece."""

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
        (name, start, length), sizes = place, saved.chunks[number].sizes
        targets = [planner.resolve_tensor(item).detach() for item in items]
        first = min(item.storage_offsets[0] for item in items)  # only the rows that are needed are read
        last = max(item.storage_offsets[0] + item.lengths[0] for item in items)
        needed = torch.Size((last - first, *sizes[1:]))
        direct = targets[0].device.type == "cpu" and targets[0].dtype == saved.properties.dtype
        direct = direct and targets[0].shape == needed and targets[0].is_contiguous()
        # By a view of its own: of a dimension of one row, a contiguous tensor may have any stride.
        piece = targets[0].view(-1).view(needed) if direct else torch.empty(needed, dtype=saved.properties.dtype)
        if not read_into(Path(self.path) / name, start, length, piece, first, sizes[0]):
            raise UserError(
                f"{Path(self.path) / name}: a piece of {items[0].storage_index.fqn} is damaged: copy it again"
            )
        for item, target in list(zip(items, targets, strict=True))[int(direct) :]:
            offsets = (item.storage_offsets[0] - first, *item.storage_offsets[1:])
            target.copy_(narrow_tensor_by_index(piece, offsets, item.lengths))


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
