"""Convert Megatron's torch_dist format to a Hugging Face folder, in the files' dtypes or as blockwise FP8."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.aux_files import copy_aux_files
from grpo_mp.checkpoint.hf_reader import INDEX, HfReader, has_hf_weights
from grpo_mp.checkpoint.hf_writer import shard_name, write_index
from grpo_mp.checkpoint.non_policy_tensors import is_non_policy_tensor, open_non_policy_tensors
from grpo_mp.checkpoint.resumable_writer import (
    PART_BYTES,
    Part,
    ProgressCallback,
    check_destination,
    fingerprint,
    map_in_threads,
    split_by_bytes,
    write_parts,
)
from grpo_mp.checkpoint.to_megatron import ModelMapping, check_nan
from grpo_mp.checkpoint.torch_dist_reader import TorchDistReader
from grpo_mp.checkpoint.worker_group import WorkerGroup
from grpo_mp.models.fp8 import FP8, SCALE, quantise, requantise, scale_shape
from grpo_mp.models.mapping import Param, unfuse


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor in the new folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class HfExporter:
    """Makes the new folder's tensors. `original`: folder of FP8 bytes to keep; `non_policy`: of the other tensors."""

    model: ModelMapping
    reader: TorchDistReader
    original: HfReader | None
    non_policy: HfReader | None
    fp8: bool

    def specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Return the new folder's tensors by source: a Megatron parameter, or a tensor outside the policy."""
        specs = {name: self._param_specs(param) for name, param in self.model.params.items()}
        if not self.non_policy:
            return specs
        names = sorted(name for name in self.non_policy.names if is_non_policy_tensor(name, self.model.hf))
        return specs | {name: self._non_policy_specs(self.non_policy, name) for name in names}

    def tensors(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that `specs` lists for a source. Raises UserError for NaN."""
        if source not in self.model.params:
            assert self.non_policy
            for name in self._with_scale(self.non_policy, source):
                yield name, self.non_policy.read_stored(name) if self.fp8 else self.non_policy.read(name)
            return
        param = self.model.params[source]
        fused = check_nan(self.reader.read(self.model.slots[source]), self.reader.folder, source)
        for name, tensor in zip(param.hf, unfuse(param, fused), strict=True):
            yield from self._quantised(name, tensor) if self._is_fp8(param, name) else [(name, tensor)]

    def _quantised(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.original and name in self.original.names and self.original.dtype(name) == FP8:
            old, old_scale = self.original.read_stored(name), self.original.read_stored(name + SCALE)
            weight, scale = requantise(tensor, old, old_scale)
        else:
            weight, scale = quantise(tensor)
        yield from ((name, weight), (name + SCALE, scale))

    def _param_specs(self, param: Param) -> dict[str, TensorSpec]:
        dtype = self.reader.dtype(self.model.slots[param.name])
        specs: dict[str, TensorSpec] = {}
        for name, shape in zip(param.hf, param.shapes, strict=True):
            fp8 = self._is_fp8(param, name)
            specs[name] = TensorSpec(shape, FP8 if fp8 else dtype)
            specs |= {name + SCALE: TensorSpec(scale_shape(shape), torch.float32)} if fp8 else {}
        return specs

    def _is_fp8(self, param: Param, name: str) -> bool:
        """Tell whether to write FP8: what `original` has in FP8, or else what releases quantise."""
        if not self.fp8:
            return False
        if self.original and self.original.has_fp8:
            return name in self.original.names and self.original.dtype(name) == FP8
        return param.is_projection

    def _non_policy_specs(self, reader: HfReader, name: str) -> dict[str, TensorSpec]:
        """Specs of a tensor that is copied unchanged, but dequantised where the new folder has no FP8."""
        dequantised = reader.dtype(name) == FP8 and not self.fp8
        return {
            stored: TensorSpec(reader.shape(stored), reader.fp8_as if dequantised else reader.dtype(stored))
            for stored in self._with_scale(reader, name)
        }

    def _with_scale(self, reader: HfReader, name: str) -> list[str]:
        return [name, name + SCALE] if self.fp8 and reader.dtype(name) == FP8 else [name]


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
    with ExitStack() as stack:
        original = stack.enter_context(HfReader(like, verify=True)) if like and has_hf_weights(like) else None
        non_policy = open_non_policy_tensors(source, verify=True) or original
        reader = TorchDistReader(source, verify=True)
        reader.check_layers(model.hf.int("num_hidden_layers"))
        exporter = HfExporter(model, reader, original, non_policy, fp8)
        specs = exporter.specs()
        sizes = {name: sum(spec.bytes for spec in outputs.values()) for name, outputs in specs.items()}
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
            weight_map = {
                name: part.name for part in parts for source_name in part.params for name in specs[source_name]
            }
            write_index(folder, weight_map, sum(sizes.values()))
            return (INDEX,)

        files = [*(file for file in reader.folder.rglob("*") if file.is_file()), aux_source / "config.json"]
        source_hash = fingerprint([*files, *(original.files if original else ())], "to-hf", fp8, part_bytes)
        write_parts(destination, source_hash, parts, load, save, finish, report_progress, workers)
