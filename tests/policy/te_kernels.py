"""TransformerEngine's kernels of an update by formula, on a CPU: what `multi_tensor/*.cu` compute for each element."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


def install_update_kernels(compiled: ModuleType) -> None:
    compiled.multi_tensor_adam = adam  # type: ignore[attr-defined]
    compiled.multi_tensor_adam_param_remainder = adam_param_remainder  # type: ignore[attr-defined]
    compiled.multi_tensor_l2norm = l2norm  # type: ignore[attr-defined]
    compiled.multi_tensor_scale = scale  # type: ignore[attr-defined]
    compiled.multi_tensor_scale_tensor = scale  # type: ignore[attr-defined]


def l2norm(chunk_size: int, noop: Tensor, lists: Lists, per_tensor: bool) -> tuple[Tensor, None]:
    assert not per_tensor
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm()[None], None


def scale(chunk_size: int, noop: Tensor, lists: Lists, factor: float | Tensor) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * factor)


def adam(chunk_size: int, noop: Tensor, lists: Lists, *arguments: Any) -> None:
    for gradient, param, *state in zip(*lists, strict=True):
        main_weight = state[2] if len(state) == 3 else param
        main_weight.copy_(_updated(gradient, main_weight.float(), *state[:2], *arguments))
        param.copy_(main_weight)


def adam_param_remainder(chunk_size: int, noop: Tensor, lists: Lists, *arguments: Any) -> None:
    """Update bfloat16 weights and the 16 bits that they lack: a weight was rounded up where these are negative."""
    for gradient, param, exp_avg, exp_avg_sq, remainder in zip(*lists, strict=True):
        assert remainder.dtype == torch.int16
        high = param.view(torch.int16).int() - (remainder < 0).int()
        bits = (high << 16) | (remainder.int() & 0xFFFF)
        bits = _updated(gradient, bits.view(torch.float32), exp_avg, exp_avg_sq, *arguments).view(torch.int32)
        remainder.copy_(bits.to(torch.int16))
        param.view(torch.int16).copy_((bits >> 16) + (remainder < 0).int())


def _updated(
    gradient: Tensor,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> Tensor:
    """Return a float32 weight after an update, with moments updated in place; each operation rounds by itself."""
    assert decoupled
    assert bias_correction
    gradient = gradient.float()
    first = beta1 * exp_avg.float() + (1 - beta1) * gradient
    second = beta2 * exp_avg_sq.float() + (1 - beta2) * gradient * gradient
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    denominator = (second / (1 - beta2**step)).sqrt() + eps
    return weight - lr * (first / (1 - beta1**step) / denominator + weight_decay * weight)
