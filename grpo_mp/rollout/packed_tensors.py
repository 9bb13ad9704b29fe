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
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return its bytes, up to the next multiple of ALIGNMENT."""
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


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
        yield view_of(packed, spec.dtype, spec.shape, offset)


def view_of(packed: Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    """Return the tensor that begins `offset` bytes into uint8 memory, as a view."""
    return packed[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
