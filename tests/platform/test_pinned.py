"""Page-locked buffers: sizes, places, and what the driver is asked for; only its answers are replaced."""

import pytest
import torch

from grpo_mp import platform
from grpo_mp.platform.pinned import PAGE_BYTES, PinnedBuffer

LIKE = [
    torch.empty(3, 1000, dtype=torch.bfloat16),
    torch.empty(7, dtype=torch.int16),
    torch.empty(0),
    torch.empty(5000),
]


class Driver:
    """Records the calls that CUDA would get."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.registered, self.freed = status, dict[int, int](), list[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.freed.append(address)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(platform, "on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_tensors_lie_apart_in_one_registered_block_of_whole_pages(driver: Driver) -> None:
    buffer = PinnedBuffer(LIKE)
    ((start, size),) = driver.registered.items()
    assert start % PAGE_BYTES == size % PAGE_BYTES == 0
    kept = sum(tensor.nbytes for tensor in LIKE)
    assert kept < size == buffer.nbytes < kept + 512 * len(LIKE) + PAGE_BYTES
    end = start
    for number, (tensor, like) in enumerate(zip(buffer.tensors, LIKE, strict=True)):
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
        assert tensor.is_contiguous()
        if like.numel():
            assert tensor.data_ptr() >= end
            assert tensor.data_ptr() % 512 == start % 512 == 0
            end = tensor.data_ptr() + tensor.nbytes
        tensor.fill_(number)
    assert end <= start + size
    assert all((tensor == number).all() for number, tensor in enumerate(buffer.tensors))


def test_memory_is_unlocked_with_the_buffer_and_stays_readable(driver: Driver) -> None:
    buffer = PinnedBuffer(LIKE)
    values = buffer.tensors[3].fill_(7)
    assert not driver.freed
    del buffer
    assert driver.freed == list(driver.registered)
    assert (values == 7).all()
