"""Write Megatron's torch_dist format part by part without a model, and find a parameter's place in it.

A checkpoint has the `.metadata` of torch.distributed.checkpoint, which lists every chunk's file, and Megatron's
metadata.json and common.pt. It stores full-model tensors, so any layout can read its shards.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param

COMMON = "common.pt"
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc\d\.weight)\d+$")


@dataclass(frozen=True)
class CheckpointSlot:
    """Place of a parameter in a torch_dist checkpoint: in the tensor `key`, which may stack layers and experts."""

    key: str
    stacked: tuple[tuple[int, int], ...]  # (position, size) on each leading axis over layers or experts
    shape: tuple[int, ...]  # of the parameter itself
    padded: bool = False  # True: the checkpoint may have further rows of vocabulary padding

    def accepts(self, size: tuple[int, ...]) -> bool:
        """Return whether a checkpoint tensor of shape `size` can contain the parameter."""
        expected = (*(count for _, count in self.stacked), *self.shape)
        if not self.padded:
            return size == expected
        return len(size) == len(expected) and size[0] >= expected[0] and size[1:] == expected[1:]


def slot_of(param: Param, config: Mapping[str, Any]) -> CheckpointSlot:
    """Return the slot of a full parameter in Megatron's checkpoints. `config`: the family's Megatron settings.

    Homogeneous layers are stacked into one tensor, with the layer as the first axis. The experts of a layer are
    stacked, too.
    """
    key, stacked = param.name, []
    frequency = config.get("moe_layer_freq", 1)
    homogeneous = isinstance(frequency, int) and frequency <= 1
    if param.layer is not None and homogeneous:
        key = LAYER.sub("decoder.layers.", key)
        stacked.append((param.layer, int(config["num_layers"])))
    if param.expert is not None:
        key = EXPERT.sub(r".mlp.experts.experts.\1", key)
        stacked.append((param.expert, param.experts))
    return CheckpointSlot(key, tuple(stacked), param.local_shape(1), param.vocabulary)


@dataclass(frozen=True)
class ModelMapping:
    """A model's parameters without aliases, and their slots in a torch_dist checkpoint, by parameter name."""

    hf: HfConfig
    params: Mapping[str, Param]
    slots: Mapping[str, CheckpointSlot]

    @classmethod
    def of(cls, folder: Path, family_name: str | None = None, trains_mtp: bool = False) -> "ModelMapping":
        """Return the mapping for the config.json of `folder`.

        `trains_mtp`: the multi-token-prediction layer is part of the policy.
        """
        hf = HfConfig.read(folder, family_name, trains_mtp=trains_mtp)
        family = family_of(hf)
        params = {name: param for name, param in family.params(hf).items() if not param.alias}
        config = family.config(hf)
        return cls(hf, params, {name: slot_of(param, config) for name, param in params.items()})


def write_part(folder: Path, tensors: Iterable[tuple[CheckpointSlot, Tensor]]) -> None:
    """Write some tensors of a checkpoint to a folder with its own metadata, to be merged by `merge_parts`."""
    by_key: dict[str, list[CheckpointableShardedTensor]] = defaultdict(list)
    for slot, tensor in tensors:
        by_key[slot.key].append(sharded_tensor(slot, tensor))
    planner, writer = DefaultSavePlanner(flatten_state_dict=False), _Writer(folder, sync_files=False)
    planner.set_up_planner({key: LocalShardsContainer(chunks) for key, chunks in by_key.items()}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    # The planner's own global plan would demand full tensors.
    plans, metadata = create_default_global_save_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def merge_parts(folder: Path, parts: Sequence[str]) -> None:
    """Merge parts, which are subfolders of `folder`, into one checkpoint by writing its metadata."""
    merged, results = Metadata({}), []
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


def sharded_tensor(slot: CheckpointSlot, tensor: Tensor) -> CheckpointableShardedTensor:
    """Return a full parameter at its slot, as the planners of torch.distributed.checkpoint need it."""
    offsets = [(axis, position, size) for axis, (position, size) in enumerate(slot.stacked)]
    data = tensor.view((1,) * len(offsets) + tuple(tensor.shape))
    return CheckpointableShardedTensor.from_sh_ten(ShardedTensor.from_rank_offsets(slot.key, data, *offsets))
