"""FP8 in the policy: checks of FP8 training (training.fp8_format), and frozen weights in FP8 beside adapters.

Of frozen weights, a projection's parameter holds float8_e4m3fn; its float32 scales, one for each 128 x 128 block of the
shard, are its attribute `weight_scale_inv`. Its layer sees values of the compute dtype while it runs. Autograd saves
the FP8 parameter and a view's geometry for the backward pass: values are made again where they are needed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.distributed.shards import tp_size
from grpo_mp.models.fp8 import FP8, dequantize, dequantize_at_once, scale_shape
from grpo_mp.models.mapping import Param
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.weights import full_name
from grpo_mp.utils.errors import UserError

# What both sizes of a matrix are multiples of: TransformerEngine's assert_dim_for_fp8_exec, blocks of MXFP8.
FEATURES = {"blockwise": 16, "tensorwise": 16, "mxfp8": 32}
BEYOND_MXFP8 = 12.0  # compute capability from which TransformerEngine has none (its quantization.py)
CAPABILITY = {  # of the GPUs that have a recipe's products, as TransformerEngine asks for it
    "blockwise": (9.0, "H100 or newer"),
    "tensorwise": (8.9, "L40 or newer"),
    "mxfp8": (10.0, "B200 or newer"),
}


def check_fp8(
    training: TrainingConfig, dtype: str, layout: LayoutConfig, params: Iterable[Param], capability: float | None
) -> None:
    """Raise UserError where the linear layers of a rank cannot compute in FP8.

    `capability`: compute capability of the GPU; None on a CPU, where only the blockwise recipe is computed.
    """
    if training.fp8_format is None:
        return
    recipe, setting = training.fp8_recipe, f"training.fp8_format={training.fp8_format}"
    least, gpus = CAPABILITY[recipe]
    if capability is None and recipe != "blockwise":
        raise UserError(f"training.fp8_recipe={recipe} needs GPUs ({gpus}): on a CPU set fp8_recipe=blockwise")
    if capability is None and training.megatron_args.get("first_last_layers_bf16"):
        raise UserError(f"{setting} on a CPU is of all layers: leave out training.megatron_args.first_last_layers_bf16")
    if capability is not None and capability < least:
        raise UserError(
            f"training.fp8_recipe={recipe} needs GPUs of compute capability {least:g} ({gpus}), these have "
            f"{capability:g}: set training.fp8_format=null"
        )
    if capability is not None and recipe == "mxfp8" and capability >= BEYOND_MXFP8:
        raise UserError(f"training.fp8_recipe=mxfp8: TransformerEngine has none for compute capability {capability:g}")
    if capability is not None and dtype != "bfloat16":
        raise UserError(f"{setting} needs model.dtype=bfloat16 on a GPU, not {dtype}")
    for param in params:
        if param.is_projection:
            _check_sizes(param, tp_size(param, layout), FEATURES[recipe], setting)


def _check_sizes(param: Param, parts: int, features: int, setting: str) -> None:
    local = param.local_shape(parts)
    if any(size % features for size in local):
        raise UserError(
            f"{setting} needs matrices whose sizes on a rank are multiples of {features}, {param.name} has {local} "
            f"with {parts} tensor-parallel parts: choose a smaller layout.tensor or layout.expert_tensor"
        )


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
                param = params.get(
                    full_name(name, chunk, params=params, expert_rank=expert_rank, expert_parallel=expert_parallel)
                )
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
