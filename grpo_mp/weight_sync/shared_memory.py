"""A bucket in anonymous shared memory: written once by the trainer, mapped by every process of the engine.

Only a note of where the tensors lie goes over HTTP. The memory has no name in any folder, so nothing is left behind
when a process is killed, and it ends when the last one that maps it lets it go.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ALIGNMENT = 64  # bytes; every tensor begins at a multiple, as views of any dtype need
LOADER = f"{__name__}.load_bucket"  # what SGLang imports: its `custom_weight_loader` and `load_format`

Named = list[tuple[str, torch.Tensor]]


@contextmanager
def export_tensors(bucket: Named) -> Iterator[torch.Tensor]:
    """Let processes of this user on this machine open the bucket, while the body runs, by its note (uint8, [n])."""
    starts = [0]
    for _, tensor in bucket:
        starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
    descriptor = os.memfd_create("grpo_mp_bucket")
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        memory = torch.from_file(path, shared=True, size=starts[-1], dtype=torch.uint8)
        places = []
        for (name, tensor), start in zip(bucket, starts, strict=False):
            place = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start)
            _view(memory, *place[1:]).copy_(tensor)
            places.append(place)
        note = json.dumps({"path": path, "nbytes": starts[-1], "places": places})
        yield torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def open_tensors(note: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The lent tensors, without a copy. They may be kept, and a change to them is seen by no other process."""
    lent = json.loads(bytes(note.tolist()))
    memory = torch.from_file(lent["path"], shared=False, size=lent["nbytes"], dtype=torch.uint8)
    for name, *place in lent["places"]:
        yield name, _view(memory, *place)


def load_bucket(model: Any, named_tensors: Named) -> None:
    """Called by SGLang in each process that holds weights; the only tensor is the note."""
    ((_, note),) = named_tensors
    model.load_weights(open_tensors(note))


def _view(memory: torch.Tensor, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    return memory[start : start + size].view(kind).view(shape)
