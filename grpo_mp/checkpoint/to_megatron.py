"""Convert a Hugging Face folder to Megatron's torch_dist format, a bounded part at a time, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader, check_tensors
from grpo_mp.checkpoint.hf_writer import copy_aux_files
from grpo_mp.checkpoint.non_policy_tensors import NON_POLICY, check_layers, is_non_policy_tensor
from grpo_mp.checkpoint.resumable_writer import (
    PART_BYTES,
    Part,
    ProgressCallback,
    check_destination,
    fingerprint,
    map_in_threads,
    write_parts,
)
from grpo_mp.checkpoint.torch_dist import GLOBAL_FILES, CheckpointSlot, merge_parts, slot_of, write_part
from grpo_mp.checkpoint.worker_group import WorkerGroup
from grpo_mp.errors import UserError
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import FP8
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, fuse, split_by_bytes


@dataclass(frozen=True)
class ModelMapping:
    """A model's parameters without aliases, and each one's slot in a torch_dist checkpoint."""

    hf: HfConfig
    params: Mapping[str, Param]
    slots: Mapping[str, CheckpointSlot]

    @classmethod
    def of(cls, folder: Path) -> "ModelMapping":
        """Make it from the folder's config.json. Raises UserError where that is missing or not supported."""
        hf = HfConfig.read(folder)
        family = family_of(hf)
        params = {name: param for name, param in family.params(hf).items() if not param.alias}
        config = family.config(hf)
        return cls(hf, params, {name: slot_of(param, config) for name, param in params.items()})


def to_megatron(
    source: Path,
    destination: Path,
    report_progress: ProgressCallback,
    part_bytes: int = PART_BYTES,
    workers: WorkerGroup | None = None,
) -> None:
    """Convert a Hugging Face folder; config and tokenizer go with the weights.

    Raises UserError, if possible before the first byte is written: torn files, missing, unknown or wrongly shaped
    tensors, a full disk, another model at `destination`, NaN. The source is only read. FP8 is stored as bfloat16,
    except in tensors that are no part of the policy, which stay as they are.
    """
    check_destination(source, destination)
    model = ModelMapping.of(source)
    with HfReader(source, verify=True) as reader:
        check_names(reader, model)
        sizes = {name: _num_bytes(reader, param) for name, param in model.params.items()}
        parts = [Part(f"part_{i:05d}", *group) for i, group in enumerate(split_by_bytes(sizes, part_bytes))]
        names = sorted(name for name in reader.stored_names if is_non_policy_tensor(name, model.hf))
        sizes = {name: prod(reader.shape(name)) * reader.dtype(name).itemsize for name in names}
        non_policy_parts = [
            Part(f"{NON_POLICY}{i:05d}.safetensors", *group)
            for i, group in enumerate(split_by_bytes(sizes, part_bytes))
        ]

        def read_fused(name: str) -> tuple[CheckpointSlot, Tensor]:
            param = model.params[name]
            tensors = [check_nan(reader.read(tensor), source, tensor) for tensor in param.hf]
            return model.slots[name], fuse(param, tensors).contiguous()

        def load(part: Part) -> list[tuple[CheckpointSlot, Tensor]] | dict[str, Tensor]:
            if part in non_policy_parts:
                return {name: reader.read_stored(name) for name in part.params}
            return list(map_in_threads(read_fused, part.params))

        def save(path: Path, tensors: list[tuple[CheckpointSlot, Tensor]] | dict[str, Tensor]) -> None:
            if isinstance(tensors, dict):
                save_file(tensors, path, metadata={"format": "pt"})
            else:
                write_part(path, tensors)

        def finish(folder: Path) -> Sequence[str]:
            merge_parts(folder, [part.name for part in parts])
            copy_aux_files(source, folder)
            return GLOBAL_FILES

        source_hash = fingerprint([*reader.files, source / "config.json"], "to-megatron", part_bytes)
        all_parts = [*parts, *non_policy_parts]
        write_parts(destination, source_hash, all_parts, load, save, finish, report_progress, workers)


def check_names(reader: HfReader, model: ModelMapping) -> None:
    """Raise UserError where the folder lacks a tensor, or has one that the mapping lacks or of another shape."""
    check_tensors(reader, model.params.values())
    check_layers(reader.names, model.hf)
    known = {name for param in model.params.values() for name in param.hf}
    tied = {"lm_head.weight"} if model.hf.tied else set()  # a copy of the embedding
    unknown = sorted(name for name in reader.names - known - tied if not is_non_policy_tensor(name, model.hf))
    if unknown:
        raise UserError(f"{reader.folder}: the mapping of {model.hf.model_type} does not know the tensor {unknown[0]}")


def _num_bytes(reader: HfReader, param: Param) -> int:
    dtypes = {reader.dtype(name) for name in param.hf}
    if len(dtypes) > 1:
        raise UserError(f"{reader.folder}: {' and '.join(param.hf)} have different dtypes, but are one parameter")
    stored = dtypes.pop()
    dtype = reader.fp8_as if stored == FP8 else stored
    return param.num_elements * dtype.itemsize


def check_nan(tensor: Tensor, folder: Path, name: str) -> Tensor:
    """Return the tensor itself. Raises UserError where it has NaN."""
    if bool(tensor.max().isnan()):  # max passes NaN on
        raise UserError(f"{folder}: the tensor {name} holds NaN: take another checkpoint")
    return tensor
