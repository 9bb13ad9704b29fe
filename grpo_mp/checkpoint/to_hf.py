"""From Megatron's torch_dist format to a Hugging Face folder, in the files' dtypes or as blockwise FP8."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.aux_files import copy_aux_files
from grpo_mp.checkpoint.hf_reader import INDEX, HfReader, holds_weights
from grpo_mp.checkpoint.non_policy_tensors import is_non_policy_tensor, open_non_policy_tensors
from grpo_mp.checkpoint.resumable_writer import (
    PART_BYTES,
    Part,
    Watch,
    build,
    check_apart,
    divide,
    each_in_threads,
    fingerprint,
)
from grpo_mp.checkpoint.to_megatron import Model, no_nan
from grpo_mp.checkpoint.torch_dist_reader import TorchDistReader
from grpo_mp.checkpoint.worker_group import WorkerGroup
from grpo_mp.models.fp8 import FP8, SCALE, quantise, requantise, scale_shape
from grpo_mp.models.mapping import Param, unfuse


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the result as its file will have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class HfExporter:
    """One conversion: where tensors come from. `original` has FP8 bytes to keep, `extras` what is no policy's."""

    model: Model
    reader: TorchDistReader
    original: HfReader | None
    extras: HfReader | None
    fp8: bool

    def stored(self) -> dict[str, dict[str, TensorSpec]]:
        """Tensors of the result by what they are made of: a parameter, or a tensor of `original` itself."""
        made = {name: self._stored_of(name) for name in self.model.params}
        return made | {name: self._stored_extra(name) for name in self._extra_names()}

    def tensors(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """What `stored` promised for one parameter or tensor. Raises UserError for NaN."""
        if source not in self.model.params:
            yield from self._extra(source)
            return
        param = self.model.params[source]
        whole = no_nan(self.reader.read(self.model.places[source]), self.reader.folder, source)
        for name, tensor in zip(param.hf, unfuse(param, whole), strict=True):
            yield from self._quantised(name, tensor) if self._is_fp8(param, name) else [(name, tensor)]

    def _quantised(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.original and name in self.original.names and self.original.dtype(name) == FP8:
            kept = self.original.read_stored(name), self.original.read_stored(name + SCALE)
            weight, scale = requantise(tensor, *kept)
        else:
            weight, scale = quantise(tensor)
        yield from ((name, weight), (name + SCALE, scale))

    def _stored_of(self, source: str) -> dict[str, TensorSpec]:
        param, dtype = self.model.params[source], self.reader.dtype(self.model.places[source])
        stored: dict[str, TensorSpec] = {}
        for name, shape in zip(param.hf, param.shapes, strict=True):
            fp8 = self._is_fp8(param, name)
            stored[name] = TensorSpec(shape, FP8 if fp8 else dtype)
            stored |= {name + SCALE: TensorSpec(scale_shape(shape), torch.float32)} if fp8 else {}
        return stored

    def _is_fp8(self, param: Param, name: str) -> bool:
        """As in `original` where that is FP8, else as releases have it."""
        if not self.fp8:
            return False
        if self.original and self.original.has_fp8:
            return name in self.original.names and self.original.dtype(name) == FP8
        return param.is_projection

    def _extra_names(self) -> list[str]:
        return (
            sorted(name for name in self.extras.names if is_non_policy_tensor(name, self.model.hf))
            if self.extras
            else []
        )

    def _stored_extra(self, name: str) -> dict[str, TensorSpec]:
        return {each: TensorSpec(tuple(tensor.shape), tensor.dtype) for each, tensor in self._extra(name, meta=True)}

    def _extra(self, name: str, meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Unchanged, but FP8 becomes values in a folder that has no FP8; `meta`: shapes and dtypes only."""
        extras = self.extras
        assert extras is not None
        fp8 = extras.dtype(name) == FP8
        for each in [name, name + SCALE] if fp8 and self.fp8 else [name]:
            if meta:
                dtype = extras.fp8_as if fp8 and not self.fp8 else extras.dtype(each)
                yield each, torch.empty(extras.shape(each), dtype=dtype, device="meta")
            else:
                yield each, extras.read_stored(each) if self.fp8 else extras.read(each)


def to_hf(
    source: Path,
    final: Path,
    like: Path | None,
    fp8: bool,
    watch: Watch,
    part_bytes: int = PART_BYTES,
    team: WorkerGroup | None = None,
) -> None:
    """Convert a checkpoint, of a run or of `to_megatron`, to a Hugging Face folder.

    Config and tokenizer come from `like`, or from the checkpoint itself. `fp8` writes blockwise FP8; blocks that did
    not change keep the bytes they have in `like`. Tensors that are no part of the policy come from the checkpoint, or
    from `like` where it has none. Raises UserError as `to_megatron` does.
    """
    check_apart(source, final)
    others = like or source
    model = Model.of(others)
    with ExitStack() as stack:
        original = stack.enter_context(HfReader(like, verify=True)) if like and holds_weights(like) else None
        extras = open_non_policy_tensors(source, verify=True) or original
        reader = TorchDistReader(source, verify=True)
        reader.check_layers(model.hf.int("num_hidden_layers"))
        back = HfExporter(model, reader, original, extras, fp8)
        stored = back.stored()
        runs = divide({name: sum(one.bytes for one in made.values()) for name, made in stored.items()}, part_bytes)
        parts = [Part(_file_name(number, len(runs)), *run) for number, run in enumerate(runs, start=1)]

        def make(part: Part) -> dict[str, Tensor]:
            made = each_in_threads(lambda of: list(back.tensors(of)), part.params)
            return {name: tensor.contiguous() for tensors in made for name, tensor in tensors}

        def write(file: Path, tensors: dict[str, Tensor]) -> None:
            save_file(tensors, file, metadata={"format": "pt"})

        def finish(folder: Path) -> Sequence[str]:
            copy_aux_files(others, folder, fp8)
            if len(parts) == 1:
                return ()
            _write_index(folder, parts, stored)
            return (INDEX,)

        files = [*(file for file in back.reader.folder.rglob("*") if file.is_file()), others / "config.json"]
        made_of = fingerprint([*files, *(original.files if original else ())], "to-hf", fp8, part_bytes)
        build(final, made_of, parts, make, write, finish, watch, team)


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_index(folder: Path, parts: list[Part], stored: dict[str, dict[str, TensorSpec]]) -> None:
    weight_map = {name: part.name for part in parts for source in part.params for name in stored[source]}
    total = sum(one.bytes for made in stored.values() for one in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
