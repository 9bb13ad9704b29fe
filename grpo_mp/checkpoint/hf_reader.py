"""Read full tensors or slices from the safetensors files of a Hugging Face folder, and check its tensors."""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor

from grpo_mp.checkpoint.stacked_experts import ExpertPart, expert_parts
from grpo_mp.models import int4
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import BLOCK, FP8, SCALE, dequantize, scale_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from grpo_mp.models.multi_token_prediction import copied_names
from grpo_mp.models.mxfp4 import BLOCKS, SCALES
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import read_json

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"  # the weights file in a folder without an index
ROTARY = (".inv_freq", ".cos_cached", ".sin_cached")  # tables that some older checkpoints hold; models compute them
LAYER = re.compile(r"^(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")


class HfReader:
    """Reads tensors, or slices of them, from a Hugging Face folder."""

    def __init__(self, folder: Path, dequantize_to: torch.dtype = torch.bfloat16) -> None:
        """Open all weight files of the folder. `dequantize_to`: dtype in which FP8, INT4 and MXFP4 are read."""
        self.folder = folder
        self.dequantize_to = dequantize_to
        if not has_hf_weights(folder):
            raise UserError(f"{folder} contains neither {SINGLE_FILE} nor {INDEX}")
        index = folder / INDEX
        shards = sorted(set(_read_index(index).values())) if index.is_file() else [SINGLE_FILE]
        self.files = tuple(folder / shard for shard in shards)
        self._handles = {file: _open(file) for file in self.files}
        self._file_of = {name: file for file, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118
        self.stored_names = frozenset(self._file_of)  # of all tensors
        packed = {name for name in self.stored_names if name.endswith(int4.PACKED)}
        self._int4 = {name.removesuffix(int4.PACKED) for name in packed}
        self._experts: dict[str, ExpertPart] = {}  # by name of an expert's tensor
        self._experts = dict(expert_parts({name: partial(self.shape, name) for name in sorted(self.stored_names)}))
        stacked = {part.stored for part in self._experts.values()}
        stacked |= {name.removesuffix(BLOCKS) + SCALES for name in stacked if name.endswith(BLOCKS)}
        parts = {name + part for name in self._int4 for part in (int4.PACKED, int4.SCALE, int4.SHAPE)}
        # Without scales, and with each expert's own tensors.
        scales = {name + SCALE for name in self.stored_names}
        self.names = self.stored_names - stacked - scales - parts | self._experts.keys() | self._int4
        self.has_fp8 = any(name + SCALE in self.stored_names for name in self.stored_names)

    def __enter__(self) -> "HfReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()

    def dtype(self, name: str) -> torch.dtype:
        if name in self._int4:
            return self.dequantize_to
        if name in self._experts:
            if self._experts[name].is_mxfp4:
                return self.dequantize_to
            name = self._experts[name].stored
        stored = self._handle(name).get_slice(name).get_dtype()
        dtype = _TYPES.get(stored)
        if dtype is None:
            raise UserError(f"{self.folder}: the tensor {name} is stored as {stored}, which torch does not know")
        return dtype

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._experts:
            return self._experts[name].shape
        if name in self._int4:
            rows, words = self.shape(name + int4.PACKED)
            return rows, words * int4.IN_WORD
        return tuple(self._handle(name).get_slice(name).get_shape())

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        if name in self._int4:
            return self._read_int4(name, axis, start, stop)
        if self.dtype(name) != FP8:
            return self.read_stored(name, axis, start, stop)
        origin = (start if axis == 0 else 0, start if axis == 1 else 0)
        return dequantize(self.read_stored(name, axis, start, stop), self._factors(name), self.dequantize_to, origin)

    def _read_int4(self, name: str, axis: int | None, start: int, stop: int) -> Tensor:
        rows, columns = self.shape(name)
        if self.shape(name + int4.SCALE) != (rows, columns // int4.GROUP) or columns % int4.GROUP:
            raise UserError(
                f"{self.folder}: {name + int4.SCALE} has shape {list(self.shape(name + int4.SCALE))}, groups of "
                f"{int4.GROUP} columns of {[rows, columns]} need {[rows, columns // int4.GROUP]}"
            )
        if axis == 0:
            packed, scale = (self.read_stored(name + part, 0, start, stop) for part in (int4.PACKED, int4.SCALE))
            return int4.dequantize(packed, scale, self.dequantize_to, (0, columns))
        first, last = (start, stop) if axis == 1 else (0, columns)
        packed = self.read_stored(name + int4.PACKED, 1, first // int4.IN_WORD, -(-last // int4.IN_WORD))
        scale = self.read_stored(name + int4.SCALE, 1, first // int4.GROUP, -(-last // int4.GROUP))
        return int4.dequantize(packed, scale, self.dequantize_to, (first, last))

    def _factors(self, name: str) -> Tensor:
        scale = name + SCALE
        if scale not in self._file_of:
            raise UserError(f"{self.folder}: the FP8 tensor {name} has no {scale}: only blockwise FP8 is read")
        shape = self.shape(scale)
        needed = scale_shape(self.shape(name))
        if shape != needed:
            raise UserError(
                f"{self.folder}: {scale} has shape {list(shape)}, {BLOCK} x {BLOCK} blocks need {list(needed)}"
            )
        return self.read_stored(scale)

    def read_stored(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """Return the full tensor, or its slice [start, stop) along `axis`, in its stored dtype; INT4 as `read`."""
        if name in self._int4:
            return self._read_int4(name, axis, start, stop)
        if name in self._experts:
            part = self._experts[name]
            return part.read(
                axis, start, stop, lambda stored: self._handle(stored).get_slice(stored), self.dequantize_to
            )
        if axis is None:
            tensor: torch.Tensor = self._handle(name).get_tensor(name)
            return tensor
        rows = self._handle(name).get_slice(name)
        cut: torch.Tensor = rows[start:stop] if axis == 0 else rows[:, start:stop]
        return cut

    def _handle(self, name: str):  # type: ignore[no-untyped-def]
        if name not in self._file_of:
            raise UserError(f"{self.folder}: no file holds the tensor {name}")
        return self._handles[self._file_of[name]]


def has_hf_weights(folder: Path) -> bool:
    """Return whether the folder has safetensors weights under Hugging Face's file names."""
    return (folder / INDEX).is_file() or (folder / SINGLE_FILE).is_file()


def check_model(reader: HfReader, params: Iterable[Param], hf: HfConfig, others: Iterable[str] = ()) -> None:
    """Refuse a folder that lacks a tensor of `params`, or has a tensor that the mapping does not read.

    `others`: names of further tensors that may be there.
    """
    shapes = {name: shape for param in params for name, shape in zip(param.hf, param.shapes, strict=True)}
    missing = shapes.keys() - reader.names
    if missing:
        raise UserError(
            f"{reader.folder}: {len(missing)} tensors are missing, the first is {min(missing)}: copy the folder again, "
            "its config.json, too"
        )
    for name, shape in shapes.items():
        check_shape(reader, name, shape)
    check_layers(reader.names, hf)
    read = {*shapes, *others, *copied_names(hf).values()}
    read |= {"lm_head.weight"} if hf.tied else set()  # a copy of the embedding
    unread = sorted(name for name in reader.names - read if not is_non_policy_tensor(name, hf))
    if unread:
        more = f" and {len(unread) - 1} more" if unread[1:] else ""
        raise UserError(
            f"{reader.folder}: the mapping of {hf.model_type} does not know the tensor {unread[0]}{more}, without "
            "which this is another model: merge adapters, or set model.family to a mapping that has it"
        )


def check_shape(reader: HfReader, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not floating-point, or has another shape than `shape`, which follows from the config."""
    stored = reader.shape(name)
    dtype = reader.dtype(name)
    if not dtype.is_floating_point:
        raise UserError(f"{reader.folder}: tensor {name} holds {str(dtype).removeprefix('torch.')}, not weights")
    if stored != shape:
        raise UserError(f"{reader.folder}: tensor {name} has shape {list(stored)}, config.json says {list(shape)}")


def check_finite(tensor: Tensor, folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor itself; refuse NaN, infinity and values beyond the largest of `dtype`."""
    # If any value is NaN, aminmax returns NaN.
    extremes = tensor.aminmax() if tensor.numel() else ()
    if not all(bool(extreme.isfinite()) for extreme in extremes):
        raise UserError(f"{folder}: the tensor {name} holds NaN or infinity: take another checkpoint")
    if not all(bool(extreme.to(dtype).isfinite()) for extreme in extremes):
        largest = torch.finfo(dtype).max
        raise UserError(f"{folder}: the tensor {name} holds values beyond {largest:,g}: set model.dtype=bfloat16")
    return tensor


def _read_index(index: Path) -> dict[str, str]:
    try:
        return dict(read_json(index)["weight_map"].items())
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of safetensors files ({error!r}): copy it again") from error


def _open(file: Path):  # type: ignore[no-untyped-def]
    if not file.exists():
        raise UserError(f"{file} is missing: the index names it")
    try:
        return safe_open(file, framework="pt", backend="pread")  # mmapped pages would count as resident memory
    except SafetensorError as error:
        reason = one_line(error, 200)
        raise UserError(f"{file} is damaged or not a safetensors file ({reason}): copy it again") from error


def is_non_policy_tensor(name: str, hf: HfConfig) -> bool:
    """Return whether a tensor is outside the policy and copied unchanged by conversions and exports.

    Such tensors are rotary tables and those of an untrained multi-token-prediction layer.
    """
    layer = LAYER.match(name)
    beyond = layer is not None and int(layer.group(1)) >= hf.policy_layers
    return beyond or name.startswith(family_of(hf).outside(hf)) or name.endswith(ROTARY)


def check_layers(names: Iterable[str], hf: HfConfig) -> None:
    """Refuse tensors of more layers than config.json has, multi-token-prediction layers included."""
    layers = hf.int("num_hidden_layers")
    mtp = 0 if family_of(hf).mtp_is_module else hf.mtp_layers
    excess = {int(layer[1]): name for name in names if (layer := LAYER.match(name)) and int(layer[1]) >= layers + mtp}
    if excess:
        raise hf.error(
            f"num_hidden_layers={layers} and num_nextn_predict_layers={mtp} do not cover {excess[min(excess)]}: set "
            "them as the weights have them"
        )


def read_non_policy_tensors(
    folder: Path, hf: HfConfig, fp8: bool = False, rank: int = 0, size: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the tensors outside the policy, the largest first, for rank `rank` of `size`.

    `fp8`: keep FP8 tensors and their scales; otherwise FP8 is dequantized.
    """
    with HfReader(folder) as reader:
        names = [name for name in (reader.stored_names if fp8 else reader.names) if is_non_policy_tensor(name, hf)]
        for name in sorted(names, key=lambda name: (-prod(reader.shape(name)), name))[rank::size]:
            yield name, reader.read_stored(name) if fp8 else reader.read(name)
