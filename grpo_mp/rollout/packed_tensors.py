"""Tensors packed one after the other in bytes: the layout of messages between ranks and of memory that engines map."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; every tensor's offset is a multiple, as views of any dtype need
NamedTensors = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor.

    `sliced`: of what it is a slice, if of anything: the dimension, its place along it, and the number of such slices.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sliced: tuple[int, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Return its bytes, up to the next multiple of ALIGNMENT."""
        return aligned(prod(self.shape) * self.dtype.itemsize)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of what it is a slice of."""
        if self.sliced is None:
            return self.shape
        dim, _, count = self.sliced
        return (*self.shape[:dim], self.shape[dim] * count, *self.shape[dim + 1 :])

    @property
    def stride(self) -> tuple[int, ...]:
        """Return the elements from one index to the next, of each dimension."""
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def margins(self) -> tuple[int, int]:
        """Return by how many bytes the full tensor begins before the slice, and ends after it, at the same strides."""
        if self.sliced is None:
            return 0, 0
        dim, index, count = self.sliced
        step = self.shape[dim] * self.stride[dim] * self.dtype.itemsize
        return index * step, (count - 1 - index) * step


def aligned(nbytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def specs_of(tensors: NamedTensors) -> list[TensorSpec]:
    """Describe tensors."""
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


def packed_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of such tensors, packed."""
    return sum(spec.nbytes for spec in specs)


def pack(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], out: Tensor) -> None:
    """Copy tensors into `out`, uint8 [packed_bytes(specs)]."""
    for tensor, view in zip(tensors, unpack(out, specs), strict=True):
        view.copy_(tensor)


def unpack(packed: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Yield views of packed tensors, uint8 [packed_bytes(specs)]."""
    offsets = accumulate((spec.nbytes for spec in specs), initial=0)
    for spec, offset in zip(specs, offsets, strict=False):
        yield packed[offset : offset + prod(spec.shape) * spec.dtype.itemsize].view(spec.dtype).view(spec.shape)
