"""Norms over all heads of queries or keys, which tensor parallelism divides (MiniMax-M2)."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class _WholeNorm(nn.Module):
    """RMSNorm over the heads of all tensor-parallel ranks together; a rank has the weight of its own heads.

    Replaces Megatron's norm of single heads: maps [T, 1, heads of the rank, D] to the same shape.
    """

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.width = width
        self.eps = config.layernorm_epsilon
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.weight = nn.Parameter(torch.ones(self.width // self.group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().flatten(-2)
        squares = wide.square().sum(-1, keepdim=True)
        # Every rank uses the sum, so its gradient is summed over ranks, too.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        scaled = wide * torch.rsqrt(total / self.width + self.eps) * self.weight.float()
        return scaled.to(x.dtype).view(x.shape)


class WholeNormAttention(SelfAttention):
    """Megatron's attention with norms over all heads of queries and of keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        # Not in the spec: megatron-core 0.19 refuses norms there without qk_layernorm.
        self.q_layernorm = _WholeNorm(self.query_projection_size, config)
        self.k_layernorm = _WholeNorm(self.kv_projection_size, config)


def use_whole_norms(block: Any) -> None:
    """Set WholeNormAttention in the spec of each layer of `block`."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.module = WholeNormAttention
