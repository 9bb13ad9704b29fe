"""Page-locked (pinned) host memory without rounding of its size, for copies at the full rate of the GPU's link."""

import mmap
import weakref
from collections.abc import Sequence

import torch

from grpo_mp import platform
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GIB

PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT = 512  # of every tensor in a buffer [bytes], as in torch's CUDA allocator


class PinnedBuffer:
    """Flat page-locked buffer, with `tensors` of the shapes and dtypes of `like`.

    torch's allocator of pinned memory would call the driver for each tensor, and may round sizes up to powers of two.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.nbytes = -(-sum(map(aligned_bytes, like)) // PAGE_BYTES) * PAGE_BYTES
        memory = torch.empty(self.nbytes + PAGE_BYTES, dtype=torch.uint8)
        first = -memory.data_ptr() % PAGE_BYTES
        pages = memory[first : first + self.nbytes]
        self.tensors = carve(pages, like)
        if platform.on_cuda() and self.nbytes:
            _register(pages)
            # Not at exit, when CUDA may be shut down already; the system then unlocks all pages anyway.
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, pages.data_ptr()).atexit = False


def aligned_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in a flat buffer [bytes], rounded up to ALIGNMENT."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def carve(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive views of a flat byte buffer, with the shapes and dtypes of the tensors in `like`."""
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
