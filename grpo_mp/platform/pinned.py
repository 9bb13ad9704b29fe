"""Page-locked (pinned) host memory, for copies at the full rate of the GPU's link."""

from collections.abc import Sequence

import torch

from grpo_mp import platform

ALIGNMENT = 512  # of every tensor in a buffer [bytes], as in torch's CUDA allocator


class PinnedBuffer:
    """Flat buffer, page-locked on a machine with a GPU, with `tensors` of the shapes and dtypes of `like`."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.nbytes = sum(map(aligned_bytes, like))
        self.tensors = carve(torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=platform.on_cuda()), like)


def aligned_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in a flat buffer [bytes], rounded up to ALIGNMENT."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def carve(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive views of a flat byte buffer, with the shapes and dtypes of the tensors in `like`."""
    tensors = []
    start = 0
    for tensor in like:
        tensors.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += aligned_bytes(tensor)
    return tensors
