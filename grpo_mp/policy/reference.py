"""The reference model: weights in host memory that are swapped with the policy's to compute logprobs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_mp.platform.pinned import PinnedBuffer


class Reference:
    """Host copy of this rank's weights. A swap needs extra device memory for one tensor only."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        values = [tensor.detach() for tensor in tensors.values()]
        self._buffer = PinnedBuffer(values)
        self._host = dict(zip(tensors, map(torch.Tensor.copy_, self._buffer.tensors, values), strict=True))

    @property
    def host_tensors(self) -> dict[str, torch.Tensor]:
        return self._host

    @torch.no_grad()
    def update(self, mix: float) -> None:
        """Set the reference to mix * policy + (1 - mix) * reference, as TRL's sync_ref_model does."""
        for name, tensor in self._tensors.items():
            host = self._host[name]
            host.copy_(host.lerp(tensor.detach().to(host.device), mix))

    @torch.no_grad()
    def take(self) -> None:
        """Set the reference to the policy's current weights."""
        for name, tensor in self._tensors.items():
            self._host[name].copy_(tensor)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the context, the policy has the reference's weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the reference and of the policy."""
        for name, tensor in self._tensors.items():
            policy = tensor.detach().clone()
            tensor.copy_(self._host[name])
            self._host[name].copy_(policy)
