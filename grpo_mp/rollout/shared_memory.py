"""Shared memory for the weights of one round: a trainer rank packs them, and an engine's SGLang processes load them.

On the host the memory is an anonymous file, which the kernel frees when the last process unmaps it, even after a kill.
On a GPU it is an allocation of the trainer, shared by CUDA IPC. Only the description of the memory (address, names,
dtypes, shapes, strides, offsets) is sent over HTTP.

If several GPUs of an engine divide an expert, the memory for a GPU contains only its slice. SGLang's loader expects the
full tensor and narrows it to the slice. Therefore it gets a view with the full shape and the slice's strides. The view
extends before and after the slice, over other tensors or margins, which are never read.
"""

import base64
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from grpo_mp.rollout.stacked_experts import load_experts

LOADER = f"{__name__}.load_weights"  # function that SGLang imports as `custom_weight_loader` and `load_format`

ALIGNMENT = 64  # of each tensor's offset [bytes], so that it can be viewed as any dtype
NamedTensors = list[tuple[str, Tensor]]

Export = dict[str, Any]  # description of shared memory and its tensors, as JSON


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor. `sliced`: for a slice: (dimension, index of the slice, number of slices)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sliced: tuple[int, int, int] | None = None

    @property
    def nbytes(self) -> int:
        return aligned(prod(self.shape) * self.dtype.itemsize)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the unsliced tensor."""
        if self.sliced is None:
            return self.shape
        dim, _, count = self.sliced
        return (*self.shape[:dim], self.shape[dim] * count, *self.shape[dim + 1 :])

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def margins(self) -> tuple[int, int]:
        """Return how far the full tensor at the slice's strides extends before and after the slice [bytes]."""
        if self.sliced is None:
            return 0, 0
        dim, index, count = self.sliced
        step = self.shape[dim] * self.stride[dim] * self.dtype.itemsize
        return index * step, (count - 1 - index) * step


def aligned(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packed_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of the packed tensors [bytes]."""
    return sum(spec.nbytes for spec in specs)


def pack(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], out: Tensor) -> None:
    """Copy tensors into the buffer `out`, uint8 [packed_bytes(specs)], one after the other."""
    for tensor, view in zip(tensors, unpack(out, specs), strict=True):
        view.copy_(tensor)


def unpack(packed: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """Yield views of the tensors in a buffer that `pack` filled. `packed`: uint8 [packed_bytes(specs)]."""
    offsets = accumulate((spec.nbytes for spec in specs), initial=0)
    for spec, offset in zip(specs, offsets, strict=False):
        yield packed[offset : offset + prod(spec.shape) * spec.dtype.itemsize].view(spec.dtype).view(spec.shape)


@contextmanager
def export_to_host(tensors: NamedTensors, specs: Sequence[TensorSpec]) -> Iterator[Export]:
    """Copy tensors to shared host memory and empty the list; yield the export, which can be opened during the body."""
    start, nbytes = _memory_range(specs)
    descriptor = os.memfd_create("grpo_mp_weights")
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        if nbytes:
            memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            pack([tensor for _, tensor in tensors], specs, memory[start:])
            del memory
        export = {"path": path, "nbytes": nbytes, "tensors": _describe(specs, start)}
        tensors.clear()
        yield export
    finally:
        os.close(descriptor)


@contextmanager
def export_by_ipc(tensors: NamedTensors, specs: Sequence[TensorSpec]) -> Iterator[Export]:
    """Copy tensors to one allocation on this rank's GPU and empty the list; yield the export, shared by CUDA IPC.

    Torch keeps the memory until the reader has released it. Does not work with expandable segments, which have no IPC
    handle.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    if not tensors:  # torch would never free shared memory that no process opens
        yield {"nbytes": 0, "tensors": []}
        return
    start, nbytes = _memory_range(specs)
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    pack([tensor for _, tensor in tensors], specs, memory[start:])
    tensors.clear()
    torch.cuda.current_stream().synchronize()  # the engine does not synchronize with this rank's stream
    _, (*_, handle, size, offset, _, counter, counter_offset, event, _) = reduce_tensor(memory)
    handles = [base64.b64encode(data).decode() for data in (handle, counter, event)]
    yield {
        "device": str(torch.cuda.get_device_properties(memory.device).uuid),  # the engine numbers devices differently
        "storage": [*handles, size, offset, counter_offset],
        "nbytes": nbytes,
        "tensors": _describe(specs, start),
    }
    del memory
    torch.cuda.ipc_collect()  # otherwise torch frees the memory only when it shares the next allocation


def select(export: Export, names: Collection[str]) -> Export:
    """Return the export restricted to the tensors with these names."""
    return {**export, "tensors": [spec for spec in export["tensors"] if spec[0] in names]}


def as_tensor(exports: Sequence[Export]) -> Tensor:
    """Encode exports as JSON in a uint8 tensor [bytes], for `open_exports`."""
    return torch.frombuffer(bytearray(json.dumps(exports).encode()), dtype=torch.uint8)


def open_exports(description: Tensor, opened: list[Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of exports by name, without a copy. `opened`: list to which their memory is appended.

    Host tensors may outlive the export; writes to host tensors are private to this process.
    """
    for export in json.loads(bytes(description.tolist())):
        if export["tensors"]:
            memory = _open_ipc(export) if "device" in export else _open_host(export)
            if opened is not None:
                opened.append(memory)
            for name, dtype, shape, stride, offset in export["tensors"]:
                typed = memory.view(getattr(torch, dtype))
                yield name, typed.as_strided(shape, stride, offset // typed.itemsize)


def load_weights(model: Any, named_tensors: NamedTensors) -> None:
    """Load exported weights into SGLang's model. SGLang calls this function with the encoded exports as one tensor."""
    ((_, description),) = named_tensors
    opened: list[Tensor] = []  # keeps the memory mapped until the copies are done
    reset_cache_scales(model)
    model.load_weights(load_experts(model, open_exports(description, opened)))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # the trainer may free the memory after SGLang's reply


def reset_cache_scales(model: torch.nn.Module) -> None:
    """Set the scales of the FP8 KV cache to 1, since a sleeping engine loses them and no weight sync sends them.

    After loading weights SGLang keeps any positive value of the scales.
    """
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            scale = getattr(module, name, None)
            if isinstance(scale, torch.nn.Parameter):
                scale.data.fill_(1.0)


def _memory_range(specs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Return the offset of the packed tensors and the size of the memory, including room for margins [bytes]."""
    start = aligned(max((spec.margins[0] for spec in specs), default=0))
    return start, start + packed_bytes(specs) + aligned(max((spec.margins[1] for spec in specs), default=0))


def _describe(specs: Sequence[TensorSpec], start: int) -> list[list[Any]]:
    """Return [name, dtype, full shape, strides, offset] of each packed tensor; `start`: offset of the first tensor."""
    offsets = accumulate((spec.nbytes for spec in specs), initial=start)
    return [
        [spec.name, str(spec.dtype).removeprefix("torch."), spec.full_shape, spec.stride, offset - spec.margins[0]]
        for spec, offset in zip(specs, offsets, strict=False)
    ]


def _open_host(export: Export) -> Tensor:
    return torch.from_file(export["path"], shared=False, size=export["nbytes"], dtype=torch.uint8)


def _open_ipc(export: Export) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    handle, counter, event, size, offset, counter_offset = export["storage"]
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    handle, counter, event = map(base64.b64decode, (handle, counter, event))
    shape = (export["nbytes"],)
    device = uuids.index(export["device"])
    return rebuild_cuda_tensor(
        *(torch.Tensor, shape, (1,), 0, torch.UntypedStorage, torch.uint8, device),
        # False: do not wait for the event. The trainer has synchronized, and torch would never free an opened event.
        *(handle, size, offset, False, counter, counter_offset, event, False),
    )
