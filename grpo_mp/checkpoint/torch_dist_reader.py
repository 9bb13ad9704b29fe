"""Read a checkpoint, Megatron's torch_dist or a run's, one full parameter at a time, without a model.

A run's checkpoint has weights by the names of Hugging Face tensors (policy/state_chunks.py), Megatron's by its own.
"""

import io
import os
import pickle
from collections import OrderedDict, defaultdict
from dataclasses import replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from grpo_mp.checkpoint.describe import OPTIMIZER_FOLDER, TORCH_DIST, WEIGHT, is_torch_dist
from grpo_mp.checkpoint.hf_reader import LAYER as HF_LAYER
from grpo_mp.checkpoint.run_state import MANIFEST, read_manifest
from grpo_mp.checkpoint.safe_metadata import SafeReader
from grpo_mp.checkpoint.torch_dist import LAYER, CheckpointSlot, sharded_tensor
from grpo_mp.models.mapping import Param, unfuse
from grpo_mp.utils.errors import UserError

OPTIMIZER = "optimizer."  # keys of the optimizer in checkpoints of Megatron itself


def read_into(file: Path, start: int, length: int, out: Tensor) -> bool:
    """Fill `out` from what torch.save wrote, `length` bytes at `start`; torch.load would copy the tensor twice.

    Returns False, and reads nothing, for no plain tensor: as `find_elements`.
    """
    with file.open("rb", buffering=0) as stream:
        place = find_elements(stream, start, length, tuple(out.shape), out.itemsize) if out.is_contiguous() else None
        return place is not None and read_at(stream, place, memory_of(out))


def find_elements(stream: FileIO, start: int, length: int, shape: tuple[int, ...], itemsize: int) -> int | None:
    """Return where the elements are in a file that torch.save wrote of a tensor, `length` bytes at `start`.

    Returns None for no plain tensor: contiguous, of this shape, in a storage of its own.
    """
    view: Any = _create_file_view(stream, start, length)
    archive: Any = torch._C.PyTorchFileReader(view)  # torch's annotations lack half of its methods
    if not archive.has_record("byteorder") or archive.get_record("byteorder") != b"little":
        return None
    try:
        layout = _TensorUnpickler(io.BytesIO(archive.get_record("data.pkl"))).load()
    except pickle.UnpicklingError:
        return None
    if not isinstance(layout, tuple) or layout[1:] != (shape, torch.empty(shape, device="meta").stride()):
        return None
    record = f"data/{layout[0]}"
    if archive.get_record_size(record) != prod(shape) * itemsize:
        return None
    return start + int(archive.get_record_offset(record))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of the host, which may be written."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def read_at(stream: FileIO, place: int, memory: memoryview) -> bool:
    """Fill `memory` from a place in a file; tell whether so much is there."""
    while memory and (count := os.preadv(stream.fileno(), [memory], place)):
        memory, place = memory[count:], place + count
    return not memory


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles a tensor to (storage key, shape, stride); nothing that a file names is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, _, shape, stride, *__: (storage, tuple(shape), tuple(stride))
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, pid: Any) -> str:
        """Return the storage's key in the archive."""
        return str(pid[2])


class TorchDistReader:
    """Reads full parameters, one at a time."""

    def __init__(self, folder: Path) -> None:
        """Open a checkpoint, or a run's step; refuse one with missing or short files."""
        self.folder = folder / "policy" if (folder / "policy").is_dir() else folder
        if not is_torch_dist(folder):
            raise UserError(f"{folder} is not a torch_dist checkpoint ({TORCH_DIST} is missing)")
        self._reader = SafeReader(self.folder)
        self.metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, True)
        ends: dict[str, int] = {}  # of the last tensor in each file
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.folder / name
            if not file.is_file() or file.stat().st_size < end:
                raise UserError(f"{file} is missing or cut short: copy it again")
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self.has_hf_names = any(key.startswith(f"{WEIGHT}/") for key in self.metadata.state_dict_metadata)

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the metadata of weights by key, without the optimizer's tensors."""
        return {
            key: tensor
            for key, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }

    def has_layer(self, number: int) -> bool:
        """Return whether a run's checkpoint has weights of a layer."""
        return any(key.startswith(f"{WEIGHT}/model.layers.{number}.") for key in self.tensors())

    def check_layers(self, count: int) -> None:
        """Raise UserError where there are weights of more layers than `count`, or adapters."""
        for key in self.tensors():
            if ".lora_A." in key:
                raise UserError(
                    f"{self.folder} holds adapters (model.lora) without the weights that they are for: the run's "
                    "folders final and exports have both"
                )
            layer = LAYER.match(key) or HF_LAYER.match(key.removeprefix(f"{WEIGHT}/"))
            if layer and int(layer[1]) >= count:
                raise UserError(f"{self.folder} contains {key}, but config.json has num_hidden_layers={count}")

    def hf_dtype(self, param: Param, slot: CheckpointSlot) -> torch.dtype:
        """Return the dtype of a parameter, which is in `slot` where Megatron wrote it. Raises as `dtype`."""
        return self.dtype(_hf_slots(param)[0] if self.has_hf_names else slot)

    def read_hf(self, param: Param, slot: CheckpointSlot) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors of a parameter, which is in `slot` where Megatron wrote it."""
        if not self.has_hf_names:
            return unfuse(param, self.read(slot))
        return tuple(self.read(tensor_slot) for tensor_slot in _hf_slots(param))

    def dtype(self, slot: CheckpointSlot) -> torch.dtype:
        """Return a parameter's dtype. Raises UserError where the checkpoint lacks it or has it in another shape."""
        dtype: torch.dtype = self._tensor_metadata(slot).properties.dtype
        return dtype

    def read(self, slot: CheckpointSlot) -> Tensor:
        """Return the full parameter, without vocabulary padding."""
        metadata = self._tensor_metadata(slot)
        chunks = self._chunks_of(slot, metadata)
        stored = [self.metadata.storage_data[MetadataIndex(slot.key, chunk.offsets)] for chunk in chunks]
        shape = tuple(metadata.size) if slot.padded else slot.shape
        tensor = torch.empty(shape, dtype=metadata.properties.dtype)
        if len(chunks) == 1:  # as `to_megatron` writes it
            out = tensor.view(chunks[0].sizes) if prod(chunks[0].sizes) == tensor.numel() else tensor
            if read_into(self.folder / stored[0].relative_path, stored[0].offset, stored[0].length, out):
                return tensor[: slot.shape[0]]
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        only_these = Metadata({slot.key: replace(metadata, chunks=chunks)})
        planner.set_up_planner({slot.key: sharded_tensor(replace(slot, shape=shape), tensor)}, only_these, True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor[: slot.shape[0]]

    def _chunks_of(self, slot: CheckpointSlot, metadata: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
        """Return a parameter's chunks; torch would search all layers and experts of the tensor for each of them."""
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


def _hf_slots(param: Param) -> list[CheckpointSlot]:
    """Return where a run's checkpoint has the Hugging Face tensors of a parameter."""
    return [CheckpointSlot(f"{WEIGHT}/{name}", (), shape) for name, shape in zip(param.hf, param.shapes, strict=True)]


def describe_torch_dist(folder: Path) -> dict[str, str]:
    """Return the rows that describe a checkpoint."""
    reader = TorchDistReader(folder)
    tensors = reader.tensors()
    files = [file for file in reader.folder.rglob("*") if file.is_file()]
    dtypes = sorted({str(tensor.properties.dtype).removeprefix("torch.") for tensor in tensors.values()})
    optimizer = (reader.folder / OPTIMIZER_FOLDER / TORCH_DIST).is_file()
    step = str(read_manifest(folder).step) if (folder / MANIFEST).is_file() else "not a step of a run"
    return {
        "format": ("checkpoint of a run" if reader.has_hf_names else "Megatron torch_dist")
        + (", with optimizer" if optimizer else ", weights only"),
        "step": step,
        "parameters": f"{sum(prod(tensor.size) for tensor in tensors.values()):,}",
        "tensors": f"{len(tensors):,}",
        "dtypes": ", ".join(dtypes),
        "files": f"{len(files)} ({sum(file.stat().st_size for file in files):,} bytes)",
    }
