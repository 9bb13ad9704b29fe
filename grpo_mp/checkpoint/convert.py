"""Convert between Hugging Face folders and Megatron's torch_dist format, in parts of bounded size, without a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import (
    NON_POLICY,
    HfReader,
    check_finite,
    check_model,
    has_hf_weights,
    is_non_policy_tensor,
    open_non_policy_tensors,
)
from grpo_mp.checkpoint.hf_writer import copy_aux_files, shard_name, write_index
from grpo_mp.checkpoint.resumable_writer import (
    PART_BYTES,
    SOURCE_FOLDER,
    Part,
    PartsWriter,
    ProgressCallback,
    fingerprint,
    map_in_threads,
)
from grpo_mp.checkpoint.run_state import SETTINGS
from grpo_mp.checkpoint.torch_dist import CheckpointSlot, ModelMapping, merge_parts, write_part
from grpo_mp.checkpoint.torch_dist_reader import SavedReader, TorchDistReader, open_checkpoint
from grpo_mp.models.fp8 import FP8, SCALE, quantize, requantize, scale_shape
from grpo_mp.models.mapping import Param, fuse, split_by_bytes
from grpo_mp.models.multi_token_prediction import copied_names
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import read_yaml


def to_megatron(
    source: Path, destination: Path, report_progress: ProgressCallback, part_bytes: int = PART_BYTES
) -> None:
    """Convert a Hugging Face folder to torch_dist, and copy its config and tokenizer.

    FP8 weights are stored as bfloat16. Tensors that are not part of the policy are copied unchanged.
    """
    model = ModelMapping.of(source)
    with HfReader(source) as reader:
        check_model(reader, model.params.values(), model.hf)
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
            tensors = [check_finite(reader.read(tensor), source, tensor) for tensor in param.hf]
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

        def finish(folder: Path) -> None:
            merge_parts(folder, [part.name for part in parts])
            copy_aux_files(source, folder)

        source_hash = fingerprint([*reader.files, source / "config.json"], "to-megatron", part_bytes)
        record = {"source": source_hash, SOURCE_FOLDER: str(source.absolute())}
        PartsWriter([*parts, *non_policy_parts], load, save, finish).write(destination, record, report_progress)


def _num_bytes(reader: HfReader, param: Param) -> int:
    dtypes = {reader.dtype(name) for name in param.hf}
    if len(dtypes) > 1:
        raise UserError(f"{reader.folder}: {' and '.join(param.hf)} have different dtypes, but are one parameter")
    stored = dtypes.pop()
    dtype = reader.dequantize_to if stored == FP8 else stored
    return param.num_elements * dtype.itemsize


@dataclass(frozen=True)
class HfExporter:
    """Computes the tensors of a Hugging Face folder from a checkpoint.

    `original`: folder with FP8 weights whose bytes are kept where values did not change; `non_policy`: name of a tensor
    outside the policy -> its reader; `copies`: name of a tensor -> name of its copy in the multi-token-prediction
    layer, written from the same values; `fp8`: write blockwise FP8.
    """

    model: ModelMapping
    reader: SavedReader | TorchDistReader
    original: HfReader | None
    non_policy: Mapping[str, HfReader]
    copies: Mapping[str, str]
    fp8: bool

    @cached_property
    def fp8_names(self) -> frozenset[str]:
        """Return the names of the tensors to write in FP8: those that are FP8 in `original`.

        If `original` has no FP8 weights, return the names of all projections, which FP8 releases quantize.
        """
        if not self.fp8:
            return frozenset()
        names = {name for name, reader in self.non_policy.items() if reader.dtype(name) == FP8}
        for param in self.model.params.values():
            for name in param.hf:
                if not (self.original and self.original.has_fp8):
                    quantized = param.is_projection
                else:
                    quantized = name in self.original.names and self.original.dtype(name) == FP8
                names |= {name} if quantized else set()
        return frozenset(names)

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return source -> tensor name -> bytes, for all tensors of the new folder.

        A source is a Megatron parameter, or a tensor outside the policy.
        """
        sizes: dict[str, dict[str, int]] = {}
        for param in self.model.params.values():
            dtype, outputs = self.reader.hf_dtype(param, self.model.slots[param.name]), sizes.setdefault(param.name, {})
            for name, shape in zip(param.hf, param.shapes, strict=True):
                fp8 = name in self.fp8_names
                outputs[name] = prod(shape) * (FP8 if fp8 else dtype).itemsize
                outputs |= {name + SCALE: prod(scale_shape(shape)) * torch.float32.itemsize} if fp8 else {}
                outputs |= {self.copies[name]: outputs[name]} if name in self.copies else {}
        for source, reader in self.non_policy.items():
            dequantized = reader.dtype(source) == FP8 and not self.fp8
            sizes[source] = {
                name: prod(reader.shape(name)) * (reader.dequantize_to if dequantized else reader.dtype(name)).itemsize
                for name in self._with_scale(source)
            }
        return sizes

    def tensors(self, source: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of the new folder's tensors that `sizes` lists for `source`."""
        if source in self.non_policy:
            reader = self.non_policy[source]
            for name in self._with_scale(source):
                yield name, reader.read_stored(name) if self.fp8 else reader.read(name)
            return
        param = self.model.params[source]
        for name, tensor in zip(param.hf, self.reader.read_hf(param, self.model.slots[source]), strict=True):
            check_finite(tensor, self.reader.folder, source)
            if name in self.copies:
                yield self.copies[name], tensor.clone()  # tensors of a safetensors file must not share memory
            if name not in self.fp8_names:
                yield name, tensor
                continue
            if self.original and self.original.has_fp8:
                old, old_scale = self.original.read_stored(name), self.original.read_stored(name + SCALE)
                weight, scale = requantize(tensor, old, old_scale)
            else:
                weight, scale = quantize(tensor)
            yield from ((name, weight), (name + SCALE, scale))

    def _with_scale(self, name: str) -> list[str]:
        return [name, name + SCALE] if name in self.fp8_names else [name]


def _folder_with_config(checkpoint: Path) -> Path:
    if (checkpoint / "config.json").exists() or not checkpoint.is_dir():
        return checkpoint
    settings = checkpoint.resolve().parent.parent / SETTINGS
    model = Path(read_yaml(settings)["model"]["path"]) if settings.is_file() else None
    if model and (model / "config.json").is_file():
        return model
    missing = f", and model.path of {settings}, {model}, is not here" if model else ""
    raise UserError(f"{checkpoint} has no config.json{missing}: name the model's folder with --like")


def to_hf(
    source: Path,
    destination: Path,
    like: Path | None,
    fp8: bool,
    report_progress: ProgressCallback,
    part_bytes: int = PART_BYTES,
) -> None:
    """Convert a run's checkpoint, or a torch_dist checkpoint, to a Hugging Face folder.

    `like`: folder of config and tokenizer; by default the checkpoint itself, or model.path of its run. `fp8`: write
    blockwise FP8; blocks whose values did not change keep their bytes from `like`. Tensors outside the policy come from
    the checkpoint if it has any, else from `like`.
    """
    aux_source = like or _folder_with_config(source)
    reader = open_checkpoint(source)
    model = ModelMapping.of(aux_source)
    if reader.has_layer(model.hf.int("num_hidden_layers")) and model.hf.get("num_nextn_predict_layers"):
        model = ModelMapping.of(aux_source, trains_mtp=True)  # the run trained the multi-token-prediction layer
    original = HfReader(like) if like and has_hf_weights(like) else None
    extra = open_non_policy_tensors(source) or original
    non_policy = {name: extra for name in sorted(extra.names) if is_non_policy_tensor(name, model.hf)} if extra else {}
    copies = {name: copy for name, copy in copied_names(model.hf).items() if extra and copy in extra.names}
    reader.check_layers(model.hf.policy_layers)
    exporter = HfExporter(model, reader, original=original, non_policy=non_policy, copies=copies, fp8=fp8)
    outputs = exporter.sizes()
    sizes = {name: sum(tensors.values()) for name, tensors in outputs.items()}
    groups = split_by_bytes(sizes, part_bytes)
    parts = [Part(shard_name(number, len(groups)), *group) for number, group in enumerate(groups, start=1)]

    def load(part: Part) -> dict[str, Tensor]:
        by_source = map_in_threads(lambda name: list(exporter.tensors(name)), part.params)
        return {name: tensor.contiguous() for tensors in by_source for name, tensor in tensors}

    def save(file: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, file, metadata={"format": "pt"})

    def finish(folder: Path) -> None:
        copy_aux_files(aux_source, folder, fp8)
        if len(parts) > 1:
            weight_map = {name: part.name for part in parts for param in part.params for name in outputs[param]}
            write_index(folder, weight_map, sum(sizes.values()))

    files = [*(file for file in reader.folder.rglob("*") if file.is_file()), aux_source / "config.json"]
    source_hash = fingerprint([*files, *(original.files if original else ())], "to-hf", fp8, part_bytes)
    PartsWriter(parts, load, save, finish).write(destination, {"source": source_hash}, report_progress)
