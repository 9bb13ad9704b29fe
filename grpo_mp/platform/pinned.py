"""Page-locked host memory of an exact size, which a GPU copies from and to at the full rate of its link."""

import mmap
import weakref
from collections.abc import Sequence

import torch

from grpo_mp import platform
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GIB

PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT = 512  # of every tensor, as torch aligns those on a device


class PinnedBuffer:
    """One flat page-locked buffer for tensors like given ones.

    torch's allocator of pinned memory calls the driver for each tensor and may round sizes up to powers of two.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.nbytes = -(-sum(map(aligned_bytes, like)) // PAGE_BYTES) * PAGE_BYTES
        memory = torch.empty(self.nbytes + PAGE_BYTES, dtype=torch.uint8)
        first = -memory.data_ptr() % PAGE_BYTES
        pages = memory[first : first + self.nbytes]
        self.tensors = carve(pages, like)
        if platform.on_cuda() and self.nbytes:
            _register(pages)
            # Not at exit: CUDA may be gone, and a process that ends gives back all its pages.
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, pages.data_ptr()).atexit = False


def aligned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes of a flat buffer."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def carve(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same shapes and dtypes as given ones, one after the other in a flat buffer of bytes."""
    tensors, start = [], 0
    for tensor in like:
        tensors.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += aligned_bytes(tensor)
    return tensors


def _register(pages: torch.Tensor) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0))
    if status:
        raise UserError(
            f"{pages.nbytes / GIB:.1f} GiB of host memory cannot be page-locked (CUDA error {status}): see the host's "
            "memory in the plan (grpo-mp plan), and give the job as much"
        )
