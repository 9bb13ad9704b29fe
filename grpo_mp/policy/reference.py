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
        copies = map(torch.Tensor.copy_, PinnedBuffer(values).tensors, values)
        self.host_tensors = dict(zip(tensors, copies, strict=True))

    @torch.no_grad()
    def update(self, mix: float = 1.0) -> None:
        """Set the reference to mix * policy + (1 - mix) * reference, as TRL's sync_ref_model does."""
        for name, tensor in self._tensors.items():
            self.host_tensors[name].lerp_(tensor.detach().to("cpu"), mix)

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
            tensor.copy_(self.host_tensors[name])
            self.host_tensors[name].copy_(policy)
