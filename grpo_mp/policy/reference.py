"""The reference model: frozen weights in host memory, swapped with the policy's to compute logprobs."""

import torch

from grpo_mp import platform


class Reference:
    """A host copy of this rank's weights. A swap needs extra memory for one tensor only."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy `tensors` as they are now; `swap` exchanges their values."""
        self._tensors = tensors
        pinned = platform.on_cuda()
        self._host = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor.detach())
            for name, tensor in tensors.items()
        }

    @torch.no_grad()
    def update(self, mix: float) -> None:
        """Set the reference to mix * policy + (1 - mix) * reference, as TRL's sync_ref_model does."""
        for name, tensor in self._tensors.items():
            host = self._host[name]
            host.copy_(host.lerp(tensor.detach().to(host.device), mix))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the reference and of the policy; a second call exchanges them back."""
        for name, tensor in self._tensors.items():
            policy = tensor.detach().clone()
            tensor.copy_(self._host[name])
            self._host[name].copy_(policy)
