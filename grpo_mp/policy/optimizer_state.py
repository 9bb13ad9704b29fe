"""Save and load the optimizer's state in pieces: each rank streams its own, in the dtypes in which it is kept.

The distributed optimizer gives each rank a contiguous piece of each flattened parameter. A piece is saved as rectangles
of the Hugging Face tensors (models/chunks.py), by torch's distributed checkpoint, which reads any rectangles from any
others: so any layout loads what any layout saved, no rank gathers anything, and nothing is widened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.optimizer import MegatronOptimizer
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

from grpo_mp.checkpoint.describe import OPTIMIZER_FOLDER, PIECE_BYTES
from grpo_mp.checkpoint.safe_metadata import SafeReader, read_metadata
from grpo_mp.errors import UserError, one_line
from grpo_mp.models.chunks import chunks_of
from grpo_mp.policy.policy import Policy

MAIN_PARAM = "main_param"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateChunk:
    """A rectangle of one state tensor: `tensor` is a view of what this rank keeps."""

    name: str  # of the state and of the Hugging Face tensor: exp_avg/model.norm.weight
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


def save_optimizer_state(policy: Policy, folder: Path) -> None:
    """Write all state of the optimizer below an existing folder. Every rank must call this.

    Raises UserError, on every rank, where one cannot write.
    """
    writer, group = dcp.FileSystemWriter(folder / OPTIMIZER_FOLDER), policy.parallel.cpu_group
    planner = _ChunkSavePlanner([piece for chunk in state_chunks(policy) for piece in _pieces(chunk)])
    with _one_sentence(f"{folder}: the checkpoint cannot be written"):
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)


def load_optimizer_state(policy: Policy, folder: Path) -> None:
    """Read this rank's state from what any layout saved. Raises UserError where a part of it is missing."""
    planner = _ChunkLoadPlanner(list(state_chunks(policy)), folder)
    read_metadata(folder / OPTIMIZER_FOLDER)  # its errors are sentences, which torch would replace by its own
    with _one_sentence(f"{folder}: the checkpoint cannot be read"):
        dcp.load({}, storage_reader=SafeReader(folder / OPTIMIZER_FOLDER), planner=planner, no_dist=True)


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Raise the first rank's error as UserError; torch collects those of all ranks with their stack traces."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, UserError):
            raise cause from error
        raise UserError(f"{what} (rank {rank}): {one_line(cause)}") from error


def _pieces(chunk: StateChunk) -> Iterator[StateChunk]:
    """Cut a chunk into rows of at most PIECE_BYTES: whoever reads a part of one reads all of it."""
    rows = max(1, PIECE_BYTES // max(1, chunk.tensor[:1].nbytes))
    for start in range(0, len(chunk.tensor), rows):
        offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
        yield replace(chunk, offsets=offsets, tensor=chunk.tensor[start : start + rows])


def state_chunks(policy: Policy) -> Iterator[StateChunk]:
    """Yield the chunks of this rank's state."""
    names = {tensor: name for name, tensor in policy.tensors.items()}
    tp_sizes, local_shards = policy.tp_sizes(), policy.local_shards()
    for part in policy.optimizer.chained_optimizers:
        for model_param in part.model_param_group_index_map:
            param = policy.params[names[model_param]]
            piece = part._get_model_param_range_map(model_param)["param"]
            tp_size, shard = tp_sizes[param.name], local_shards[param.name]
            coords = policy.parallel.coords
            tp_rank = coords.tensor if param.expert is None else coords.expert_tensor
            chunks = list(chunks_of(param, tp_size, shard, piece.start, piece.end))
            for state_name, tensor in _state_tensors(part, model_param).items():
                for chunk in chunks:
                    flat = tensor.detach().view(-1)[chunk.start - piece.start : chunk.stop - piece.start]
                    yield StateChunk(
                        name=f"{state_name}/{param.hf[chunk.tensor]}",
                        shape=param.shapes[chunk.tensor],
                        offsets=chunk.offsets,
                        tensor=flat.view(chunk.sizes),
                        is_replica=param.alias or (param.tp_dim is None and tp_rank > 0),
                    )


def _state_tensors(part: MegatronOptimizer, model_param: torch.nn.Parameter) -> dict[str, Tensor]:
    """Return moments and main weight of a parameter's piece; none where the weights themselves are the main ones."""
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    state = part.optimizer.state[main_param]
    tensors = {name: state[name] for name in MOMENTS}
    if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return tensors | {MAIN_PARAM: state["master_param"]}
    own_storage = main_param.untyped_storage().data_ptr() != model_param.untyped_storage().data_ptr()
    return tensors | ({MAIN_PARAM: main_param} if own_storage else {})


class _ChunkSavePlanner(SavePlanner):
    """Saves the chunks of each rank that are no replicas."""

    def __init__(self, chunks: list[StateChunk]) -> None:
        self._chunks = {chunk.index: chunk for chunk in chunks if not chunk.is_replica}

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
                        chunk.storage, TensorProperties.create_from_tensor(chunk.tensor), torch.Size(chunk.shape)
                    ),
                )
                for index, chunk in self._chunks.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._chunks[MetadataIndex(write_item.index.fqn, write_item.index.offset)].tensor


class _ChunkLoadPlanner(LoadPlanner):
    """Reads the chunks of this rank from those that were saved."""

    def __init__(self, chunks: list[StateChunk], folder: Path) -> None:
        self._chunks, self._folder = {chunk.index: chunk for chunk in chunks}, folder

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for chunk in self._chunks.values():
            saved = self._saved.get(chunk.name)
            reads = (
                create_read_items_for_chunk_list(chunk.name, saved, [chunk.storage])
                if isinstance(saved, TensorStorageMetadata) and tuple(saved.size) == chunk.shape
                else []
            )
            if sum(prod(read.lengths) for read in reads) != chunk.tensor.numel():
                raise UserError(
                    f"{self._folder}: the checkpoint lacks {chunk.name} {list(chunk.shape)} or a part of it: it is "
                    "another model's, another optimizer's, or of another version of grpo_mp"
                )
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("the optimizer's state is tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offset = read_item.dest_index.offset
        chunk = self._chunks[MetadataIndex(read_item.dest_index.fqn, offset)]
        tensor = chunk.tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
