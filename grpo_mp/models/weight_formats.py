"""Formats in which engines hold projections: blockwise FP8, MXFP8, INT4."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mp.models import fp8, int4, mxfp8
from grpo_mp.models.mapping import Param, Shape


class Stored(NamedTuple):
    """One tensor of a quantized weight: suffix of its name, dtype and shape."""

    suffix: str
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class WeightFormat:
    """Number format of an engine's projections.

    `name`: value of engine.args.quantization; `title`: for sentences; `block`: rows and columns with one scale;
    `precision`: key of UNIT_ROUNDOFF of policy/rounding.py; `quantize`: [R, C] to the tensors that `stored` describes,
    given shape and dtype of the weight; `shape_suffix`: of a further tensor with the shape of the full weight, int64.
    """

    name: str
    title: str
    block: tuple[int, int]
    precision: str
    quantize: Callable[[Tensor], tuple[Tensor, ...]]
    stored: Callable[[Shape, torch.dtype], tuple[Stored, ...]]
    shape_suffix: str = ""
    experts_only: bool = False  # only routed experts are quantized
    pads: bool = False  # the last block of a row or column may be smaller

    def quantized(self, param: Param) -> tuple[bool, ...]:
        """Return for each Hugging Face tensor of a parameter whether it is quantized."""
        if self.experts_only and param.expert is None:
            return (False,) * len(param.hf)
        return param.in_fp8

    def bytes_per_element(self, dtype: torch.dtype) -> float:
        """Return the bytes of an element of a weight of `dtype`, including its share of the scales."""
        shape = (fp8.BLOCK, fp8.BLOCK)
        return sum(prod(one.shape) * one.dtype.itemsize for one in self.stored(shape, dtype)) / prod(shape)


def _fp8_tensors(shape: Shape, _: torch.dtype) -> tuple[Stored, ...]:
    return Stored("", fp8.FP8, shape), Stored(fp8.SCALE, torch.float32, fp8.scale_shape(shape))


def _mxfp8_tensors(shape: Shape, _: torch.dtype) -> tuple[Stored, ...]:
    rows, columns = shape
    return Stored("", fp8.FP8, shape), Stored(fp8.SCALE, torch.uint8, (rows, columns // mxfp8.BLOCK))


def _int4_tensors(shape: Shape, dtype: torch.dtype) -> tuple[Stored, ...]:
    rows, columns = shape
    packed = Stored(int4.PACKED, torch.int32, (rows, columns // int4.IN_WORD))
    return packed, Stored(int4.SCALE, dtype, (rows, columns // int4.GROUP))


BLOCKWISE_FP8 = WeightFormat(
    "fp8", "blockwise FP8", (fp8.BLOCK, fp8.BLOCK), "fp8", fp8.quantize, _fp8_tensors, pads=True
)
MXFP8 = WeightFormat("mxfp8", "MXFP8", (1, mxfp8.BLOCK), "fp8", mxfp8.quantize, _mxfp8_tensors)
INT4 = WeightFormat(
    "compressed-tensors",
    "INT4",
    (1, int4.GROUP),
    "int4",
    int4.quantize,
    _int4_tensors,
    shape_suffix=int4.SHAPE,
    experts_only=True,
)
FORMATS = {one.name: one for one in (BLOCKWISE_FP8, MXFP8, INT4)}
