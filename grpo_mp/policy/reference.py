"""The reference: frozen weights in host memory that change places with the policy's while it computes logprobs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_mp import platform


class Reference:
    """A host copy of this rank's weights. Only one tensor more than policy and reference ever exists."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy `tensors` as they are now; they are what `on_device` exchanges."""
        self._tensors = tensors
        pinned = platform.on_cuda()
        self._host = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            self._host[name].copy_(tensor.detach())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._host.values())

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the module holds the reference; the policy waits in its place on the host."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def refresh(self, mix: float) -> None:
        """Become mix x policy + (1 - mix) x what it was, as TRL's sync_ref_model does."""
        for name, tensor in self._tensors.items():
            host = self._host[name]
            host.copy_(host.lerp(tensor.detach().to(host.device), mix))

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, tensor in self._tensors.items():
            waiting = tensor.detach().clone()
            tensor.copy_(self._host[name])
            self._host[name].copy_(waiting)
