"""Read and write Megatron's torch_dist format without a model, one parameter or one part at a time.

A checkpoint has the `.metadata` of torch.distributed.checkpoint, which lists every chunk's file, and Megatron's
metadata.json and common.pt. It stores full-model tensors, so any layout can read its shards.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from grpo_mp import platform
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, unfuse
from grpo_mp.utils.errors import UserError

platform.prepare()  # makes Megatron importable without a GPU

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.strategies.checkpointable import (  # noqa: E402
    CheckpointableShardedTensor,
    LocalShardsContainer,
)

COMMON = "common.pt"
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc\d\.(?:weight|bias))\d+$")
DELTA_PARTS = ("query", "key", "value", "z", "beta", "alpha")  # rows of fused parameters of gated delta nets
OPTIMIZER = "optimizer."  # prefix of optimizer keys in checkpoints that Megatron saved


@dataclass(frozen=True)
class CheckpointSlot:
    """Place of a parameter in a torch_dist checkpoint: in the tensor `key`, which may stack layers and experts."""

    key: str
    stacked: tuple[tuple[int, int], ...]  # (position, size) on each leading axis over layers or experts
    shape: tuple[int, ...]  # of the parameter itself
    padded: bool  # True: the checkpoint may have further rows of vocabulary padding


def slots_of(param: Param, config: Mapping[str, Any]) -> tuple[CheckpointSlot, ...]:
    """Return the slots of a full parameter in Megatron's checkpoints, which hold its rows one after the other.

    Homogeneous layers are stacked into one tensor, with the layer as the first axis. The experts of a layer are
    stacked, too. Fused parameters of gated delta nets have a slot for each part. `config`: the family's Megatron
    settings.
    """
    key = param.name
    stacked = []
    frequency = config.get("moe_layer_freq", 1)
    homogeneous = isinstance(frequency, int) and frequency <= 1 and "linear_attention_freq" not in config
    if param.layer is not None and homogeneous:
        key = LAYER.sub("decoder.layers.", key)
        stacked.append((param.layer, int(config["num_layers"])))
    if param.expert is not None:
        key = EXPERT.sub(r".mlp.experts.experts.\1", key)
        stacked.append((param.expert, param.experts))
    slot = CheckpointSlot(key, tuple(stacked), param.local_shape(1), param.vocabulary)
    if not param.sections or param.groups:
        return (slot,)
    rows = ((section.stop - section.start) * section.parts for section in param.sections)
    return tuple(
        replace(slot, key=f"{key}.{part}", shape=(count, *slot.shape[1:]))
        for part, count in zip(DELTA_PARTS, rows, strict=False)  # convolutions have the first three
    )


def write_part(folder: Path, tensors: Iterable[tuple[CheckpointSlot, Tensor]]) -> None:
    """Write some tensors of a checkpoint to a folder with its own metadata, to be merged by `merge_parts`."""
    by_key: dict[str, list[CheckpointableShardedTensor]] = defaultdict(list)
    for slot, tensor in tensors:
        offsets = [(axis, position, size) for axis, (position, size) in enumerate(slot.stacked)]
        data = tensor.view((1,) * len(offsets) + tuple(tensor.shape))
        sharded = ShardedTensor.from_rank_offsets(slot.key, data, *offsets)
        by_key[slot.key].append(CheckpointableShardedTensor.from_sh_ten(sharded))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer = _Writer(folder, sync_files=False)
    planner.set_up_planner({key: LocalShardsContainer(chunks) for key, chunks in by_key.items()}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    # The planner's own global plan would demand full tensors.
    plans, metadata = create_default_global_save_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def merge_parts(folder: Path, parts: Iterable[str]) -> None:
    """Merge parts, which are subfolders of `folder`, into one checkpoint by writing its metadata."""
    merged = Metadata({})
    results = []
    for part in parts:
        metadata = FileSystemReader(folder / part).read_metadata()
        for key, tensor in metadata.state_dict_metadata.items():
            full_tensor = merged.state_dict_metadata.setdefault(key, replace(tensor, chunks=[]))  # type: ignore[arg-type]
            full_tensor.chunks.extend(tensor.chunks)  # type: ignore[union-attr]
        for index, info in metadata.storage_data.items():
            moved = replace(info, relative_path=f"{part}/{info.relative_path}")
            results.append(WriteResult(index, info.length, moved))
    torch.save({}, folder / COMMON)
    _Writer(folder).finish(merged, [results])
    save_config(CheckpointingConfig("torch_dist"), str(folder))


class _Writer(FileSystemWriter):
    """Writer without torch's path and random id in the metadata, so that two conversions are bitwise equal."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class TorchDistReader:
    """Reads full parameters of a torch_dist checkpoint, one at a time."""

    def __init__(self, folder: Path, hf: HfConfig) -> None:
        if not (folder / ".metadata").is_file():
            raise UserError(
                f"{folder} is neither a run's checkpoint nor a torch_dist checkpoint (.metadata is missing)"
            )
        self.folder = folder
        self._config = family_of(hf).config(hf)
        metadata = FileSystemReader(folder).read_metadata()
        self._storage = metadata.storage_data
        self._tensors = {
            key: tensor
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }
        self._chunks: dict[str, dict[tuple[int, ...], list[MetadataIndex]]] = {}

    def unread(self, params: Iterable[Param]) -> set[str]:
        """Return the names of the stored tensors that hold none of the parameters."""
        return self._tensors.keys() - {slot.key for param in params for slot in slots_of(param, self._config)}

    def dtype(self, param: Param) -> torch.dtype:
        dtype: torch.dtype = self._metadata(slots_of(param, self._config)[0]).properties.dtype
        return dtype

    def read(self, param: Param) -> Sequence[Tensor]:
        """Return the Hugging Face tensors of a parameter."""
        parts = [self._read_slot(slot) for slot in slots_of(param, self._config)]
        return unfuse(param, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _read_slot(self, slot: CheckpointSlot) -> Tensor:
        metadata = self._metadata(slot)
        axes = len(slot.stacked)
        tensor = torch.empty(tuple(metadata.size)[axes:], dtype=metadata.properties.dtype)
        filled = 0
        for index in self._index(slot, metadata):
            piece = self._read_chunk(index)
            offsets = index.offset or ()
            piece = piece.view(piece.shape[axes:])
            places = [slice(at, at + size) for at, size in zip(offsets[axes:], piece.shape, strict=True)]
            tensor[tuple(places)] = piece
            filled += piece.numel()
        if filled != tensor.numel():
            raise UserError(f"{self.folder}: pieces of {slot.key} are missing: save or convert it again")
        return tensor[: slot.shape[0]]

    def _read_chunk(self, index: MetadataIndex) -> Tensor:
        place = self._storage[index]
        with (self.folder / place.relative_path).open("rb") as stream:
            stream.seek(place.offset)
            piece: Tensor = torch.load(BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        return piece

    def _index(self, slot: CheckpointSlot, metadata: TensorStorageMetadata) -> list[MetadataIndex]:
        """Return the chunks of one layer or expert; a tensor may stack tens of thousands of them."""
        if slot.key not in self._chunks:
            by_position: dict[tuple[int, ...], list[MetadataIndex]] = defaultdict(list)
            for chunk in metadata.chunks:
                by_position[tuple(chunk.offsets[: len(slot.stacked)])].append(MetadataIndex(slot.key, chunk.offsets))
            self._chunks[slot.key] = by_position  # only when complete, as several threads read
        return self._chunks[slot.key][tuple(position for position, _ in slot.stacked)]

    def _metadata(self, slot: CheckpointSlot) -> TensorStorageMetadata:
        if slot.key not in self._tensors:
            raise UserError(f"{self.folder}: the tensor {slot.key} is missing: it is of another model")
        metadata = self._tensors[slot.key]
        size = tuple(metadata.size)
        expected = (*(count for _, count in slot.stacked), *slot.shape)
        if size != expected and not (slot.padded and size[0] > expected[0] and size[1:] == expected[1:]):
            raise UserError(f"{self.folder}: {slot.key} has shape {list(size)}, config.json says {list(expected)}")
        return metadata
