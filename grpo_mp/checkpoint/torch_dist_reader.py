"""Read full parameters of a torch_dist or a run's checkpoint, one at a time, without a model."""

import re
from collections import defaultdict
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from grpo_mp.checkpoint.chunk_files import SavedTensors, read_index
from grpo_mp.checkpoint.describe import (
    TORCH_DIST,
    WEIGHT,
    is_converted,
    is_saved,
    is_torch_dist,
    policy_folder,
)
from grpo_mp.checkpoint.hf_reader import LAYER as HF_LAYER
from grpo_mp.checkpoint.hf_reader import HfReader, open_non_policy_tensors
from grpo_mp.checkpoint.torch_dist import LAYER, CheckpointSlot, ModelMapping, sharded_tensor
from grpo_mp.models.mapping import Param, unfuse
from grpo_mp.utils.errors import UserError

OPTIMIZER = "optimizer."  # prefix of optimizer keys in checkpoints that Megatron saved


class SavedReader:
    """Reads the weights of a run's checkpoint, which are stored as Hugging Face tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = policy_folder(folder)
        self._saved = SavedTensors(self.folder, read_index(self.folder))

    def has_layer(self, number: int) -> bool:
        return any(name.startswith(f"{WEIGHT}/model.layers.{number}.") for name in self._saved.tensors)

    def check_layers(self, count: int) -> None:
        """Refuse a checkpoint with adapters, or with more layers than `count`."""
        for name in self._saved.tensors:
            if ".lora_A." in name:
                raise UserError(
                    f"{self.folder} holds adapters (model.lora) without the weights that they are for: the run's "
                    "folders final and exports have both"
                )
            _check_layer(self.folder, name, HF_LAYER.match(name.removeprefix(f"{WEIGHT}/")), count)

    def hf_dtype(self, param: Param, _: CheckpointSlot) -> torch.dtype:
        return self._saved.dtype(f"{WEIGHT}/{param.hf[0]}")

    def read_hf(self, param: Param, _: CheckpointSlot) -> tuple[Tensor, ...]:
        names = zip(param.hf, param.shapes, strict=True)
        return tuple(self._saved.read(f"{WEIGHT}/{name}", shape) for name, shape in names)


class TorchDistReader:
    """Reads full parameters of a torch_dist checkpoint, one at a time."""

    def __init__(self, folder: Path) -> None:
        """Open a checkpoint; refuse one with missing or truncated files."""
        self.folder = folder
        if not is_torch_dist(folder):
            raise UserError(f"{folder} is not a torch_dist checkpoint ({TORCH_DIST} is missing)")
        self._reader = FileSystemReader(folder)
        try:
            self.metadata = self._reader.read_metadata()
        except Exception as error:
            raise UserError(f"{folder / TORCH_DIST} is damaged ({type(error).__name__}): copy it again") from error
        self._reader.set_up_storage_reader(self.metadata, True)
        ends: dict[str, int] = {}  # file -> end of its last tensor [bytes]
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.folder / name
            if not file.is_file() or file.stat().st_size < end:
                raise UserError(f"{file} is missing or cut short: copy it again")
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return key -> metadata of the weights, without optimizer tensors."""
        return {
            key: tensor
            for key, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }

    def has_layer(self, number: int) -> bool:
        return False

    def check_layers(self, count: int) -> None:
        for key in self.tensors():
            _check_layer(self.folder, key, LAYER.match(key), count)

    def hf_dtype(self, param: Param, slot: CheckpointSlot) -> torch.dtype:
        dtype: torch.dtype = self._tensor_metadata(slot).properties.dtype
        return dtype

    def read_hf(self, param: Param, slot: CheckpointSlot) -> tuple[Tensor, ...]:
        return unfuse(param, self.read(slot))

    def read(self, slot: CheckpointSlot) -> Tensor:
        """Return the full parameter at a slot, without vocabulary padding."""
        metadata = self._tensor_metadata(slot)
        chunks = self._chunks_of(slot, metadata)
        shape = tuple(metadata.size) if slot.padded else slot.shape
        tensor = torch.empty(shape, dtype=metadata.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        only_these = Metadata({slot.key: replace(metadata, chunks=chunks)})
        planner.set_up_planner({slot.key: sharded_tensor(replace(slot, shape=shape), tensor)}, only_these, True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor[: slot.shape[0]]

    def _chunks_of(self, slot: CheckpointSlot, metadata: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
        """Return the metadata of a parameter's chunks.

        torch would search the chunks of all layers and experts of the tensor for each parameter.
        """
        if slot.key not in self._chunks:
            groups: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
            for chunk in metadata.chunks:
                groups[tuple(chunk.offsets[: len(slot.stacked)])].append(chunk)
            self._chunks[slot.key] = groups
        chunks = self._chunks[slot.key][tuple(position for position, _ in slot.stacked)]
        if sum(prod(chunk.sizes) for chunk in chunks) < prod(slot.shape):
            raise UserError(f"{self.folder}: pieces of {slot.key} are missing: save or convert it again")
        return chunks

    def _tensor_metadata(self, slot: CheckpointSlot) -> TensorStorageMetadata:
        metadata = self.metadata.state_dict_metadata.get(slot.key)
        if not isinstance(metadata, TensorStorageMetadata):
            raise UserError(f"{self.folder}: the tensor {slot.key} is missing: it is of another model")
        if not slot.accepts(tuple(metadata.size)):
            raise UserError(f"{self.folder}: {slot.key} has shape {list(metadata.size)}, config.json says otherwise")
        return metadata


class ConvertedReader:
    """Reads the tensors of a converted (torch_dist) folder by Hugging Face name, with the interface of HfReader."""

    def __init__(self, folder: Path, family: str | None = None) -> None:
        self.folder = folder
        self._model, self._reader = ModelMapping.of(folder, family), TorchDistReader(folder)
        self._reader.check_layers(self._model.hf.int("num_hidden_layers"))
        extra = open_non_policy_tensors(folder)
        self._non_policy = dict.fromkeys(extra.stored_names, extra) if extra else {}
        self._params = {name: param for param in self._model.params.values() for name in param.hf}
        self.names = self.stored_names = frozenset(self._params) | frozenset(self._non_policy)
        params, slots = self._model.params, self._model.slots
        self._dtypes = {name: self._reader.hf_dtype(param, slots[name]) for name, param in params.items()}
        # Callers read the tensors of a fused parameter one after the other, so the last parameter is cached.
        self._cached_param = ""
        self._cached: dict[str, Tensor] = {}

    def __enter__(self) -> "ConvertedReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._cached_param, self._cached = "", {}

    def shape(self, name: str) -> tuple[int, ...]:
        param = self._params.get(name)
        return param.shapes[param.hf.index(name)] if param else self._non_policy[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[self._params[name].name] if name in self._params else self._non_policy[name].dtype(name)

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """Return the full tensor, or its slice [start, stop) along `axis`; FP8 is dequantized."""
        if name not in self._params:
            return self._non_policy[name].read(name, axis, start, stop)
        tensor = self.read_stored(name)
        return tensor if axis is None else tensor.narrow(axis, start, stop - start)

    def read_stored(self, name: str) -> Tensor:
        if name not in self._params:
            return self._non_policy[name].read_stored(name)
        param = self._params[name]
        if self._cached_param != param.name:
            tensors = self._reader.read_hf(param, self._model.slots[param.name])
            self._cached_param, self._cached = param.name, dict(zip(param.hf, tensors, strict=True))
        return self._cached[name]


def open_weights(folder: Path, family: str | None = None) -> HfReader | ConvertedReader:
    """Open the weights of a Hugging Face or converted folder. `family`: model family, see `HfConfig`."""
    return ConvertedReader(folder, family) if is_converted(folder) else HfReader(folder)


def _check_layer(folder: Path, name: str, layer: re.Match[str] | None, count: int) -> None:
    if layer and int(layer[1]) >= count:
        raise UserError(f"{folder} contains {name}, but config.json has num_hidden_layers={count}")


def open_checkpoint(folder: Path) -> SavedReader | TorchDistReader:
    """Open a run's checkpoint or a torch_dist checkpoint."""
    return SavedReader(folder) if is_saved(folder) else TorchDistReader(folder)
