"""Convert between Hugging Face folders and Megatron's torch_dist format, in parts of bounded size, without a model.

A conversion that was killed is resumed: the folder is called NAME.incomplete until all parts are written, and a part
gets its name only when it is on disk.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mp.checkpoint.chunk_files import INDEX, WEIGHT, read_index, read_tensor
from grpo_mp.checkpoint.hf_reader import HfReader, check_finite, check_model, has_hf_weights, is_non_policy_tensor
from grpo_mp.checkpoint.hf_writer import (
    copy_aux_files,
    fp8_config,
    incomplete_folder,
    save_tensors,
    shard_name,
    write_index,
)
from grpo_mp.checkpoint.run_state import SETTINGS
from grpo_mp.checkpoint.stacked_experts import stack_experts
from grpo_mp.checkpoint.torch_dist import TorchDistReader, merge_parts, slots_of, write_part
from grpo_mp.models.chunks import matrix_shape
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import FP8, SCALE, quantize, requantize
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, fuse
from grpo_mp.models.multi_token_prediction import copied_names
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import stat_digest, sync_to_disk, write_json
from grpo_mp.utils.reading import read_json, read_yaml
from grpo_mp.utils.splitting import split_by_size

RECORD = "conversion.json"  # file with the model, the digest of the source files, and the options of a conversion
PART_BYTES = 2**29
NUM_READERS = 2  # threads that read and cast the parameters of one part
ReportProgress = Callable[[int, int], None]  # (bytes of the part just written, bytes of all missing parts)


def to_megatron(source: Path, destination: Path, report_progress: ReportProgress, part_bytes: int = PART_BYTES) -> None:
    """Convert a Hugging Face folder to torch_dist, FP8 weights to bfloat16. Tensors outside the policy are left out."""
    hf = HfConfig.read(source)
    config = family_of(hf).config(hf)
    params = _params(hf)

    def load(name: str) -> list[Any]:
        param = params[name]
        tensors = [check_finite(reader.read(tensor), source, tensor) for tensor in param.hf]
        slots = slots_of(param, config)
        rows = fuse(param, tensors).contiguous().split([slot.shape[0] for slot in slots])
        return list(zip(slots, rows, strict=True))

    with HfReader(source) as reader:
        check_model(reader, params.values(), hf)
        sizes = {name: param.num_elements * _dtype(reader, param).itemsize for name, param in params.items()}
        groups = split_by_size(sizes.items(), itemgetter(1), part_bytes)
        parts = {f"part_{number:05d}": dict(group) for number, group in enumerate(groups)}
        files = stat_digest([*reader.files, source / "config.json"])
        record = {"model": str(source.absolute()), "files": files, "options": f"to-megatron {part_bytes}"}
        if folder := _write_parts(
            destination, record, parts, load=load, save=write_part, report_progress=report_progress
        ):
            merge_parts(folder, parts)
            _complete(folder, destination)


def to_hf(
    source: Path,
    destination: Path,
    like: Path | None,
    fp8: bool,
    report_progress: ReportProgress,
    part_bytes: int = PART_BYTES,
) -> None:
    """Convert a run's checkpoint, or a torch_dist checkpoint, to a Hugging Face folder.

    `like`: folder of config, tokenizer and tensors outside the policy; by default model.path of the run, or the folder
    that was converted. `fp8`: write blockwise FP8; blocks whose values did not change keep their bytes from `like`.
    """
    like = like or _model_of(source)
    hf = HfConfig.read(like)
    saved = source / "policy" if (source / "policy").is_dir() else source
    reader = SavedReader(saved) if (saved / INDEX).is_file() else TorchDistReader(source, hf)
    if isinstance(reader, SavedReader) and hf.mtp_layers and reader.has(family_of(hf).mtp_prefix(hf)):
        hf = HfConfig.read(like, trains_mtp=True)  # the run trained the multi-token-prediction layer
    params = _params(hf)
    quantization = fp8_config(hf) if fp8 else None
    if unread := reader.unread(params.values()):
        raise UserError(
            f"{source} holds {'adapters' if any('.lora_' in name for name in unread) else 'other tensors'}, such as "
            f"{min(unread)}, which the model in {like} does not have"
        )
    tensors = _HfTensors(params, reader, HfReader(like) if has_hf_weights(like) else None, hf, fp8)
    groups = [*split_by_size(tensors.sizes().items(), itemgetter(1), part_bytes)]
    parts = {shard_name(number, len(groups)): dict(group) for number, group in enumerate(groups, start=1)}
    files = [*(file for file in reader.folder.rglob("*") if file.is_file()), like / "config.json"]
    files += tensors.original.files if tensors.original else ()
    record = {"model": str(like.absolute()), "files": stat_digest(files), "options": f"to-hf {fp8} {part_bytes}"}
    if folder := _write_parts(
        destination, record, parts, load=tensors.load, save=_save, report_progress=report_progress
    ):
        copy_aux_files(like, folder, quantization)
        write_index(folder, list(parts))
        _complete(folder, destination)


class SavedReader:
    """Reads the weights of a run's checkpoint, which are stored as Hugging Face tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = read_index(folder)

    def has(self, prefix: str) -> bool:
        """Return whether the name of a stored tensor begins with `prefix`."""
        return any(name.startswith(f"{WEIGHT}/{prefix}") for name in self._index)

    def unread(self, params: Iterable[Param]) -> set[str]:
        """Return the names of the stored tensors that hold none of the parameters."""
        return self._index.keys() - {f"{WEIGHT}/{name}" for param in params for name in param.hf}

    def dtype(self, param: Param) -> torch.dtype:
        stored = self._index.get(f"{WEIGHT}/{param.hf[0]}")
        return stored.dtype if stored else torch.float32  # `read` refuses a missing tensor

    def read(self, param: Param) -> Sequence[Tensor]:
        """Return the Hugging Face tensors of a parameter."""
        return [
            read_tensor(f"{WEIGHT}/{name}", matrix_shape(shape), self.folder, self._index).view(shape)
            for name, shape in zip(param.hf, param.shapes, strict=True)
        ]


Reader = SavedReader | TorchDistReader


@dataclass(frozen=True)
class _HfTensors:
    """Computes the tensors of a Hugging Face folder from a checkpoint and from the folder `original`."""

    params: Mapping[str, Param]
    reader: Reader
    original: HfReader | None
    hf: HfConfig
    fp8: bool

    @cached_property
    def stacks(self) -> dict[int | None, list[Param]]:
        """Return the parameters of each layer's experts, if they are stacked; else {}."""
        stacks: dict[int | None, list[Param]] = {}
        if family_of(self.hf).stacks_experts:
            for param in self.params.values():
                if param.expert is not None:
                    stacks.setdefault(param.layer, []).append(param)
        return stacks

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each parameter, and of each tensor outside the policy.

        Stacked experts of a layer count together, under the name of the first parameter.
        """
        sizes = {name: param.num_elements * self.reader.dtype(param).itemsize for name, param in self.params.items()}
        for first, *others in self.stacks.values():
            sizes[first.name] += sum(sizes.pop(param.name) for param in others)
        if not self.original:
            return sizes
        names = sorted(name for name in self.original.names if is_non_policy_tensor(name, self.hf))
        return sizes | {name: prod(self.original.shape(name)) * 2 for name in names}

    def load(self, name: str) -> list[tuple[str, Tensor]]:
        """Return the tensors of a parameter, or a tensor outside the policy."""
        if name not in self.params:
            assert self.original
            stored = [name, name + SCALE] if self.fp8 and self.original.dtype(name) == FP8 else [name]
            read = self.original.read_stored if self.fp8 else self.original.read
            return [(stored_name, read(stored_name)) for stored_name in stored]
        param = self.params[name]
        if param.expert is None or not self.stacks:
            return self._tensors(param)
        of_layer = chain.from_iterable(map(self._tensors, self.stacks[param.layer]))
        return list(stack_experts(of_layer, param.experts))

    def _tensors(self, param: Param) -> list[tuple[str, Tensor]]:
        tensors = list[tuple[str, Tensor]]()
        copies = copied_names(self.hf)
        for hf_name, tensor, in_fp8 in zip(param.hf, self.reader.read(param), param.in_fp8, strict=True):
            check_finite(tensor, self.reader.folder, hf_name)
            tensors += self._quantize(hf_name, tensor, in_fp8) if self.fp8 else [(hf_name, tensor)]
            copy = copies.get(hf_name)
            if copy and self.original and copy in self.original.names:
                tensors.append((copy, tensor.clone()))  # tensors of a safetensors file must not share memory
        return tensors

    def _quantize(self, name: str, tensor: Tensor, in_fp8: bool) -> list[tuple[str, Tensor]]:
        """Quantize a tensor that `original` has in FP8; if it has none in FP8, one that is `in_fp8` in releases."""
        if self.original and self.original.has_fp8:
            if name not in self.original.names or self.original.dtype(name) != FP8:
                return [(name, tensor)]
            old = self.original.read_stored(name)
            old_scale = self.original.read_stored(name + SCALE)
            weight, scale = requantize(tensor, old, old_scale)
        elif in_fp8:
            weight, scale = quantize(tensor)
        else:
            return [(name, tensor)]
        return [(name, weight), (name + SCALE, scale)]


def _params(hf: HfConfig) -> dict[str, Param]:
    return {name: param for name, param in family_of(hf).params(hf).items() if not param.alias}


def _dtype(reader: HfReader, param: Param) -> torch.dtype:
    stored = (reader.dtype(name) for name in param.hf)
    dtypes = {reader.dequantize_to if dtype == FP8 else dtype for dtype in stored}
    if len(dtypes) > 1:
        raise UserError(f"{reader.folder}: {' and '.join(param.hf)} have different dtypes, but are one parameter")
    return dtypes.pop()


def _model_of(checkpoint: Path) -> Path:
    """Return the folder of the model whose weights a checkpoint has."""
    record = checkpoint / RECORD
    settings = checkpoint.resolve().parent.parent / SETTINGS
    model = None
    if record.is_file():
        model = Path(read_json(record)["model"])
    elif settings.is_file():
        model = Path(read_yaml(settings)["model"]["path"])
    if model and (model / "config.json").is_file():
        return model
    missing = f"its model {model} is not here" if model else "its model is not known"
    raise UserError(f"{checkpoint}: {missing}: name the model's folder with --like")


def _save(file: Path, tensors: list[tuple[str, Tensor]]) -> None:
    save_tensors(file, {name: tensor.contiguous() for name, tensor in tensors})


def _write_parts(
    destination: Path,
    record: Mapping[str, str],
    parts: Mapping[str, Mapping[str, int]],
    load: Callable[[str], list[Any]],
    save: Callable[[Path, list[Any]], None],
    report_progress: ReportProgress,
) -> Path | None:
    """Write the missing parts and return their folder; return None if `destination` is complete.

    A part is loaded while the one before is written, so two are in memory. `parts`: bytes by name, by file or folder;
    `load`: returns the tensors stored under a name; `save`: writes a part.
    """
    folder = incomplete_folder(destination)
    for written in (destination, folder):
        if written.exists() and not ((written / RECORD).is_file() and read_json(written / RECORD) == record):
            raise UserError(f"{written} is of another conversion, or of none: choose another destination")
    if destination.exists():
        return None
    write_json(folder / RECORD, record)
    missing = {part: group for part, group in parts.items() if not (folder / part).exists()}
    for path in folder.iterdir():  # remove unfinished parts and temporary files of libraries
        if path.name not in (RECORD, *parts):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def write(part: str, content: list[Any]) -> None:
        unfinished = folder / f"unfinished_{part}"
        save(unfinished, content)
        for path in (*unfinished.rglob("*"), unfinished):
            sync_to_disk(path)
        unfinished.rename(folder / part)
        report_progress(sum(parts[part].values()), sum(sum(sizes.values()) for sizes in missing.values()))

    with ThreadPoolExecutor(NUM_READERS) as readers, ThreadPoolExecutor(1) as writer:
        writing: Future[None] | None = None
        for part, names in missing.items():
            content = [item for items in readers.map(load, names) for item in items]
            if writing:
                writing.result()
            writing = writer.submit(write, part, content)
            del content
        if writing:
            writing.result()
    return folder


def _complete(folder: Path, destination: Path) -> None:
    for file in folder.iterdir():
        sync_to_disk(file)
    folder.rename(destination)
