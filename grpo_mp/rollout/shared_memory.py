"""Weight buckets in anonymous shared memory: written by the trainer, mapped by every process of the engine.

Only metadata (path, names, dtypes, shapes, offsets) goes over HTTP. The memory has no name in a file system, so a
killed process leaves nothing behind; it is freed when the last process unmaps it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ALIGNMENT = 64  # bytes; every tensor's offset is a multiple, as views of any dtype need
LOADER = f"{__name__}.load_bucket"  # what SGLang imports: its `custom_weight_loader` and `load_format`

NamedTensors = list[tuple[str, torch.Tensor]]


@contextmanager
def export_tensors(bucket: NamedTensors) -> Iterator[torch.Tensor]:
    """Copy the bucket to shared memory; yield its metadata (uint8 [n]), by which this user's processes can open it.

    It can be opened while the body runs.
    """
    offsets = [0]
    for _, tensor in bucket:
        offsets.append(offsets[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
    descriptor = os.memfd_create("grpo_mp_bucket")
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        memory = torch.from_file(path, shared=True, size=offsets[-1], dtype=torch.uint8)
        tensors = []
        for (name, tensor), offset in zip(bucket, offsets, strict=False):
            spec = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
            _view(memory, *spec).copy_(tensor)
            tensors.append((name, *spec))
        metadata = json.dumps({"path": path, "nbytes": offsets[-1], "tensors": tensors})
        yield torch.frombuffer(bytearray(metadata.encode()), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def open_tensors(metadata: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the exported tensors without a copy. They may outlive the export; writes to them are private."""
    bucket = json.loads(bytes(metadata.tolist()))
    memory = torch.from_file(bucket["path"], shared=False, size=bucket["nbytes"], dtype=torch.uint8)
    for name, *spec in bucket["tensors"]:
        yield name, _view(memory, *spec)


def load_bucket(model: Any, named_tensors: NamedTensors) -> None:
    """Load a bucket into SGLang's model; `named_tensors` holds only the metadata. SGLang calls this in each rank."""
    ((_, metadata),) = named_tensors
    model.load_weights(open_tensors(metadata))


def _view(memory: torch.Tensor, dtype_name: str, shape: list[int], offset: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    size = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)
