"""Buffers in host memory."""

import torch

from grpo_mp.platform.pinned import ALIGNMENT, PinnedBuffer

LIKE = [
    torch.empty(3, 1000, dtype=torch.bfloat16),
    torch.empty(7, dtype=torch.int16),
    torch.empty(0),
    torch.empty(5000),
]


def test_tensors_lie_apart_in_one_buffer() -> None:
    buffer = PinnedBuffer(LIKE)
    used = sum(tensor.nbytes for tensor in LIKE)
    assert used < buffer.nbytes < used + ALIGNMENT * len(LIKE)
    for number, (tensor, like) in enumerate(zip(buffer.tensors, LIKE, strict=True)):
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
        assert tensor.is_contiguous()
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(buffer.tensors))
    assert len({tensor.untyped_storage().data_ptr() for tensor in buffer.tensors}) == 1
