"""Frozen weights in blockwise FP8 beside adapters: what is kept, and how linear layers compute with it.

A projection's parameter holds float8_e4m3fn; its float32 scales, one for each 128 x 128 block of the shard, are
its attribute `weight_scale_inv`. Its layer sees values of the compute dtype while it runs. What autograd would keep of
them for the backward pass are the FP8 parameter and a view's geometry: values are made again where they are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from grpo_mp.models.fp8 import FP8, dequantize, dequantize_at_once, scale_shape
from grpo_mp.models.mapping import Param
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.weights import full_name


def hold_in_fp8(
    chunks: Sequence[PolicyModel], params: dict[str, Param], expert_rank: int, expert_parallel: int, dtype: torch.dtype
) -> None:
    """Replace the parameters of the chunks' projections by uninitialized FP8 ones; layers compute in `dtype`.

    `params`: of the model without adapters. Call it after Megatron's wrappers, which cast floating-point parameters.
    """
    for chunk in chunks:
        for prefix, module in chunk.named_modules():
            names = []
            for name, tensor in module.named_parameters(prefix, recurse=False):
                if tensor.requires_grad:  # an adapter
                    continue
                param = params.get(full_name(name, chunk, params, expert_rank, expert_parallel))
                if param and param.is_projection:
                    names.append(name.rpartition(".")[2])
                    scale = tensor.new_ones(scale_shape(tuple(tensor.shape)), dtype=torch.float32)
                    tensor.weight_scale_inv = scale
                    tensor.data = torch.empty_like(tensor, dtype=FP8)
            if names:
                module.forward = _DequantizingForward(module, module.forward, tuple(names), dtype)


def scale_of(tensor: Tensor) -> Tensor | None:
    """Return the scale of a parameter in FP8; None of any other."""
    return tensor.weight_scale_inv if tensor.dtype == FP8 else None  # type: ignore[attr-defined]


def with_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors and, by names of their own, the scales of those in FP8: all that a rank holds of them."""
    scales = {f"{name}_scale_inv": scale_of(tensor) for name, tensor in tensors.items()}
    return {**tensors, **{name: tensor for name, tensor in scales.items() if tensor is not None}}


def values_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter itself, or the values of an FP8 one in `dtype`."""
    scale = scale_of(tensor)
    if scale is None:
        return tensor.detach()
    convert = dequantize if tensor.device.type == "cpu" else dequantize_at_once
    return convert(tensor.detach(), scale, dtype)


@dataclass(frozen=True)
class _SavedView:
    """What the backward pass has of a weight: where its values come from, and which view of them."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(frozen=True)
class _DequantizingForward:
    """The forward pass of a linear layer that finds values under the names of its FP8 parameters while it runs."""

    module: nn.Module
    forward: Callable[..., Any]
    names: tuple[str, ...]
    dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer. An attribute of the instance hides the parameter, for Megatron's layers and others'."""
        values = {name: self._values(name) for name in self.names}
        by_storage = {one.untyped_storage().data_ptr(): name for name, one in values.items()}

        def pack(tensor: Tensor) -> Tensor | _SavedView:
            name = by_storage.get(tensor.untyped_storage().data_ptr())
            if name is None:
                return tensor
            return _SavedView(name, tensor.size(), tensor.stride(), tensor.storage_offset())

        vars(self.module).update(values)
        try:
            with saved_tensors_hooks(pack, self._unpack):
                return self.forward(*args, **kwargs)
        finally:
            for name in self.names:
                del vars(self.module)[name]

    def _values(self, name: str) -> Tensor:
        return values_of(self.module.get_parameter(name), self.dtype)

    def _unpack(self, saved: Tensor | _SavedView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._values(saved.name).as_strided(saved.size, saved.stride, saved.offset)
