"""Convert Megatron's torch_dist format to a Hugging Face folder, in the files' dtypes or as blockwise FP8."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import INDEX, HfReader, has_hf_weights
from grpo_mp.checkpoint.hf_writer import copy_aux_files, shard_name, write_index
from grpo_mp.checkpoint.non_policy_tensors import is_non_policy_tensor, open_non_policy_tensors
from grpo_mp.checkpoint.resumable_writer import (
    PART_BYTES,
    Part,
    ProgressCallback,
    check_destination,
    fingerprint,
    map_in_threads,
    write_parts,
)
from grpo_mp.checkpoint.to_megatron import ModelMapping, check_nan
from grpo_mp.checkpoint.torch_dist_reader import TorchDistReader
from grpo_mp.checkpoint.worker_group import WorkerGroup
from grpo_mp.models.fp8 import FP8, SCALE, quantise, requantise, scale_shape
from grpo_mp.models.mapping import split_by_bytes, unfuse


@dataclass(frozen=True)
class HfExporter:
    """Makes the new folder's tensors. `original`: folder of FP8 bytes to keep; `non_policy`: readers by tensor name."""

    model: ModelMapping
    reader: TorchDistReader
    original: HfReader | None
    non_policy: Mapping[str, HfReader]
    fp8: bool

    @cached_property
    def fp8_names(self) -> frozenset[str]:
        """Tensors to write as FP8: those of the policy that `original` has in FP8, or else that releases quantise."""
        if not self.fp8:
            return frozenset()
        names = {name for name, reader in self.non_policy.items() if reader.dtype(name) == FP8}
        for param in self.model.params.values():
            for name in param.hf:
                if not (self.original and self.original.has_fp8):
                    quantised = param.is_projection
                else:
                    quantised = name in self.original.names and self.original.dtype(name) == FP8
                names |= {name} if quantised else set()
        return frozenset(names)

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of the new folder's tensors by source: a Megatron parameter, or a tensor outside the policy.

        The latter is copied unchanged, but dequantised where the new folder has no FP8.
        """
        sizes: dict[str, dict[str, int]] = {}
        for param in self.model.params.values():
            dtype, outputs = self.reader.dtype(self.model.slots[param.name]), sizes.setdefault(param.name, {})
            for name, shape in zip(param.hf, param.shapes, strict=True):
                fp8 = name in self.fp8_names
                outputs[name] = prod(shape) * (FP8 if fp8 else dtype).itemsize
                outputs |= {name + SCALE: prod(scale_shape(shape)) * torch.float32.itemsize} if fp8 else {}
        for source, reader in self.non_policy.items():
            dequantised = reader.dtype(source) == FP8 and not self.fp8
            sizes[source] = {
                name: prod(reader.shape(name)) * (reader.fp8_as if dequantised else reader.dtype(name)).itemsize
                for name in self._with_scale(source)
            }
        return sizes

    def tensors(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that `sizes` lists for a source. Raises UserError for NaN."""
        if source in self.non_policy:
            reader = self.non_policy[source]
            for name in self._with_scale(source):
                yield name, reader.read_stored(name) if self.fp8 else reader.read(name)
            return
        param = self.model.params[source]
        fused = check_nan(self.reader.read(self.model.slots[source]), self.reader.folder, source)
        for name, tensor in zip(param.hf, unfuse(param, fused), strict=True):
            if name not in self.fp8_names:
                yield name, tensor
                continue
            if self.original and self.original.has_fp8:
                old, old_scale = self.original.read_stored(name), self.original.read_stored(name + SCALE)
                weight, scale = requantise(tensor, old, old_scale)
            else:
                weight, scale = quantise(tensor)
            yield from ((name, weight), (name + SCALE, scale))

    def _with_scale(self, name: str) -> list[str]:
        return [name, name + SCALE] if name in self.fp8_names else [name]


def to_hf(
    source: Path,
    destination: Path,
    like: Path | None,
    fp8: bool,
    report_progress: ProgressCallback,
    part_bytes: int = PART_BYTES,
    workers: WorkerGroup | None = None,
) -> None:
    """Convert a checkpoint, of a run or of `to_megatron`, to a Hugging Face folder.

    Config and tokenizer come from `like`, or from the checkpoint itself. `fp8` writes blockwise FP8; blocks that did
    not change keep the bytes they have in `like`. Tensors that are no part of the policy come from the checkpoint, or
    from `like` where it has none. Raises UserError as `to_megatron` does.
    """
    check_destination(source, destination)
    aux_source = like or source
    model = ModelMapping.of(aux_source)
    original = HfReader(like, verify=True) if like and has_hf_weights(like) else None
    extra = open_non_policy_tensors(source, verify=True) or original
    non_policy = {name: extra for name in sorted(extra.names) if is_non_policy_tensor(name, model.hf)} if extra else {}
    reader = TorchDistReader(source, verify=True)
    reader.check_layers(model.hf.int("num_hidden_layers"))
    exporter = HfExporter(model, reader, original, non_policy, fp8)
    outputs = exporter.sizes()
    sizes = {name: sum(tensors.values()) for name, tensors in outputs.items()}
    groups = split_by_bytes(sizes, part_bytes)
    parts = [Part(shard_name(number, len(groups)), *group) for number, group in enumerate(groups, start=1)]

    def load(part: Part) -> dict[str, Tensor]:
        by_source = map_in_threads(lambda name: list(exporter.tensors(name)), part.params)
        return {name: tensor.contiguous() for tensors in by_source for name, tensor in tensors}

    def save(file: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, file, metadata={"format": "pt"})

    def finish(folder: Path) -> Sequence[str]:
        copy_aux_files(aux_source, folder, fp8)
        if len(parts) == 1:
            return ()
        weight_map = {name: part.name for part in parts for param in part.params for name in outputs[param]}
        write_index(folder, weight_map, sum(sizes.values()))
        return (INDEX,)

    files = [*(file for file in reader.folder.rglob("*") if file.is_file()), aux_source / "config.json"]
    source_hash = fingerprint([*files, *(original.files if original else ())], "to-hf", fp8, part_bytes)
    write_parts(destination, source_hash, parts, load, save, finish, report_progress, workers)
