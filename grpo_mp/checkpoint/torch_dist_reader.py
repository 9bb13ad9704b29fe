"""Reading a checkpoint in Megatron's torch_dist format, one whole parameter at a time, without a model."""

from collections import defaultdict
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from grpo_mp.checkpoint.describe import TORCH_DIST, is_torch_dist
from grpo_mp.checkpoint.manifest import Checksums
from grpo_mp.checkpoint.run_state import MANIFEST, checkpoint_checksums, read_manifest
from grpo_mp.checkpoint.safe_metadata import SafeReader
from grpo_mp.checkpoint.saved_tensor import read_into
from grpo_mp.checkpoint.torch_dist import LAYER, CheckpointSlot, chunk
from grpo_mp.errors import UserError

OPTIMIZER = "optimizer."


class TorchDistReader:
    """Reads whole parameters, one at a time."""

    def __init__(self, folder: Path, verify: bool = False) -> None:
        """`folder`: a checkpoint, or a run's step; `verify`: compare each file with its checksum before it is used.

        Raises UserError where it is none, or a file is cut short or changed.
        """
        self.folder = folder / "policy" if (folder / "policy").is_dir() else folder
        if not is_torch_dist(folder):
            raise UserError(f"{folder}: no torch_dist checkpoint is there ({TORCH_DIST} is missing)")
        self.checksums = _checksums(folder) if verify else Checksums(self.folder, {})
        self.checksums.check(self.folder / TORCH_DIST)
        self._reader = SafeReader(self.folder)
        self.metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, True)
        _check_files(self.folder, self.metadata)
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Weights by key, without the optimizer's tensors."""
        return {
            key: held
            for key, held in self.metadata.state_dict_metadata.items()
            if isinstance(held, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }

    def check_layers(self, count: int) -> None:
        """Raise UserError where there are weights of more layers than `count`."""
        for key in self.tensors():
            layer = LAYER.match(key)
            if layer and int(layer[1]) >= count:
                raise UserError(f"{self.folder}: {key} is there, but config.json has num_hidden_layers={count}")

    def dtype(self, place: CheckpointSlot) -> torch.dtype:
        """Raises UserError where the checkpoint lacks the tensor or has it in another shape."""
        dtype: torch.dtype = self._held(place).properties.dtype
        return dtype

    def read(self, place: CheckpointSlot) -> Tensor:
        """The whole parameter, without the padding of its vocabulary."""
        held = self._held(place)
        for piece in self._chunks_of(place, held):
            info = self.metadata.storage_data[MetadataIndex(place.key, piece.offsets)]
            self.checksums.check(self.folder / info.relative_path)
        shape = tuple(held.size) if place.padded else place.shape
        tensor = torch.empty(shape, dtype=held.properties.dtype)
        if self._read_plainly(place, held, tensor):
            return tensor[: place.shape[0]]
        whole = replace(place, shape=shape)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        near = Metadata({place.key: replace(held, chunks=self._chunks_of(place, held))})
        planner.set_up_planner({place.key: chunk(whole, tensor)}, near, True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor[: place.shape[0]]

    def _read_plainly(self, place: CheckpointSlot, held: TensorStorageMetadata, tensor: Tensor) -> bool:
        """Where one piece is the whole parameter, as `to_megatron` writes it."""
        chunks = self._chunks_of(place, held)
        if len(chunks) != 1:
            return False
        (piece,) = chunks
        info = self.metadata.storage_data[MetadataIndex(place.key, piece.offsets)]
        out = tensor.view(piece.sizes) if prod(piece.sizes) == tensor.numel() else tensor
        return read_into(self.folder / info.relative_path, info.offset, info.length, out)

    def _chunks_of(self, place: CheckpointSlot, held: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
        """Those of one parameter: torch would look at all layers and experts of the tensor, for each of them."""
        if place.key not in self._chunks:
            groups: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
            for one in held.chunks:
                groups[tuple(one.offsets[: len(place.stacked)])].append(one)
            self._chunks[place.key] = groups
        chunks = self._chunks[place.key][tuple(position for position, _ in place.stacked)]
        if sum(prod(one.sizes) for one in chunks) < prod(place.shape):
            raise UserError(f"{self.folder}: pieces of {place.key} are missing: save or convert it again")
        return chunks

    def _held(self, place: CheckpointSlot) -> TensorStorageMetadata:
        held = self.metadata.state_dict_metadata.get(place.key)
        if not isinstance(held, TensorStorageMetadata):
            raise UserError(f"{self.folder}: the tensor {place.key} is missing: it is of another model")
        if not place.accepts(tuple(held.size)):
            raise UserError(f"{self.folder}: {place.key} has shape {list(held.size)}, config.json says otherwise")
        return held


def describe_torch_dist(folder: Path) -> dict[str, str]:
    """What a checkpoint holds, for people. Raises UserError for a torn one, or one that differs from its checksums."""
    reader = TorchDistReader(folder, verify=True)
    reader.checksums.check_share()
    held = reader.tensors()
    files = [file for file in reader.folder.rglob("*") if file.is_file()]
    dtypes = sorted({str(tensor.properties.dtype).removeprefix("torch.") for tensor in held.values()})
    optimizer = any(key.startswith(OPTIMIZER) for key in reader.metadata.state_dict_metadata)
    step = str(read_manifest(folder).step) if (folder / MANIFEST).is_file() else "not a step of a run"
    return {
        "format": "Megatron torch_dist" + (", with optimizer" if optimizer else ", weights only"),
        "step": step,
        "parameters": f"{sum(prod(tensor.size) for tensor in held.values()):,}",
        "tensors": f"{len(held):,}",
        "dtypes": ", ".join(dtypes),
        "files": f"{len(files)} ({sum(file.stat().st_size for file in files):,} bytes)",
        "checksums": reader.checksums.summary,
    }


def _checksums(folder: Path) -> Checksums:
    return checkpoint_checksums(folder) if (folder / MANIFEST).is_file() else Checksums.of_conversion(folder)


def _check_files(folder: Path, metadata: Metadata) -> None:
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in needed.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size < size:
            raise UserError(f"{file} is missing or cut short: copy it again")
