"""From a Hugging Face folder to Megatron's torch_dist format and back, a bounded part at a time, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.aux_files import copy_aux_files
from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.checkpoint.non_policy_tensors import NON_POLICY, check_layers, is_non_policy_tensor
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
from grpo_mp.checkpoint.torch_dist import JOINT, CheckpointSlot, join_parts, slot_of, write_part
from grpo_mp.checkpoint.validate import check_tensors
from grpo_mp.checkpoint.worker_group import WorkerGroup
from grpo_mp.errors import UserError
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import FP8
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, fuse


@dataclass(frozen=True)
class Model:
    """The parameters of one architecture and where they stand in a checkpoint; aliases are stored once."""

    hf: HfConfig
    params: Mapping[str, Param]
    places: Mapping[str, CheckpointSlot]

    @classmethod
    def of(cls, folder: Path) -> "Model":
        """Of the folder's config.json. Raises UserError where it is missing or not supported."""
        hf = HfConfig.read(folder)
        family = family_of(hf)
        params = {name: param for name, param in family.params(hf).items() if not param.alias}
        config = family.config(hf)
        return cls(hf, params, {name: slot_of(param, config) for name, param in params.items()})


def to_megatron(
    source: Path, final: Path, watch: Watch, part_bytes: int = PART_BYTES, team: WorkerGroup | None = None
) -> None:
    """Convert a Hugging Face folder; config and tokenizer go with the weights.

    Raises UserError, before the first byte where it can: torn files, missing, unknown or wrongly shaped tensors, a
    full disk, another model at `final`; and for NaN. The source is only read; FP8 is stored as bfloat16, save
    in tensors that are no part of the policy, which stay as they are.
    """
    check_apart(source, final)
    model = Model.of(source)
    with HfReader(source, verify=True) as reader:
        check_names(reader, model)
        runs = divide({name: _bytes(reader, param) for name, param in model.params.items()}, part_bytes)
        parts = [Part(f"part_{number:05d}", *run) for number, run in enumerate(runs)]
        extras = divide(_extra_sizes(reader, model.hf), part_bytes)
        kept = [Part(f"{NON_POLICY}{number:05d}.safetensors", *run) for number, run in enumerate(extras)]

        def make(part: Part) -> list[tuple[CheckpointSlot, Tensor]] | dict[str, Tensor]:
            if part in kept:
                return {name: reader.read_stored(name) for name in part.params}
            fused = each_in_threads(lambda name: _fused(reader, model, name), part.params)
            return [(model.places[name], tensor) for name, tensor in zip(part.params, fused, strict=True)]

        def write(path: Path, made: list[tuple[CheckpointSlot, Tensor]] | dict[str, Tensor]) -> None:
            if isinstance(made, dict):
                save_file(made, path, metadata={"format": "pt"})
            else:
                write_part(path, made)

        def finish(folder: Path) -> Sequence[str]:
            join_parts(folder, [part.name for part in parts])
            copy_aux_files(source, folder)
            return JOINT

        made_of = fingerprint([*reader.files, source / "config.json"], "to-megatron", part_bytes)
        build(final, made_of, [*parts, *kept], make, write, finish, watch, team)


def check_names(reader: HfReader, model: Model) -> None:
    """Raise UserError where the folder lacks tensors, has one that the mapping does not know, or one of wrong shape."""
    check_tensors(reader, model.params.values())
    check_layers(reader.names, model.hf)
    known = {name for param in model.params.values() for name in param.hf}
    tied = {"lm_head.weight"} if model.hf.tied else set()  # a copy of the embedding
    unknown = sorted(name for name in reader.names - known - tied if not is_non_policy_tensor(name, model.hf))
    if unknown:
        raise UserError(f"{reader.folder}: the mapping of {model.hf.model_type} does not know the tensor {unknown[0]}")


def _bytes(reader: HfReader, param: Param) -> int:
    dtypes = {reader.dtype(name) for name in param.hf}
    if len(dtypes) > 1:
        raise UserError(f"{reader.folder}: {' and '.join(param.hf)} have different dtypes, but are one parameter")
    return sum(prod(shape) for shape in param.shapes) * _read_dtype(reader, dtypes.pop()).itemsize


def _extra_sizes(reader: HfReader, hf: HfConfig) -> dict[str, int]:
    names = sorted(name for name in reader.stored_names if is_non_policy_tensor(name, hf))
    return {name: prod(reader.shape(name)) * reader.dtype(name).itemsize for name in names}


def _read_dtype(reader: HfReader, stored: torch.dtype) -> torch.dtype:
    return reader.fp8_as if stored == FP8 else stored


def _fused(reader: HfReader, model: Model, name: str) -> Tensor:
    param = model.params[name]
    return fuse(param, [no_nan(reader.read(hf_name), reader.folder, hf_name) for hf_name in param.hf]).contiguous()


def no_nan(tensor: Tensor, folder: Path, name: str) -> Tensor:
    """The tensor itself. Raises UserError where it holds NaN."""
    if bool(tensor.max().isnan()):  # the largest of values with NaN among them is NaN
        raise UserError(f"{folder}: the tensor {name} holds NaN: take another checkpoint")
    return tensor
