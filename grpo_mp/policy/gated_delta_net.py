"""Layers of Qwen3-Next and Qwen3.5: specs with gated delta nets."""

from copy import copy
from importlib.metadata import version
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from grpo_mp import platform
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.utils.errors import UserError


class OutputNorm:
    """Norm of a gated delta net's output. Unlike weights of other norms, its weight is not centred on zero."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> nn.Module:  # type: ignore[misc]
        own = copy(config)
        own.layernorm_zero_centered_gamma = False
        norm: nn.Module = TENorm(config=own, hidden_size=hidden_size, eps=eps)
        return norm


def linear_attention_spec(config: TransformerConfig, vp_stage: int | None) -> ModuleSpec:
    """Return the spec of the layers of one model chunk, with a gated delta net where `linear_attention_freq` has 1."""
    block: Any = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    for layer in block.layer_specs:
        submodules = layer.submodules.self_attention.submodules
        if hasattr(submodules, "out_norm"):
            submodules.out_norm = OutputNorm
    return block


def check_gated_delta_nets(model: ModelShape, context: int) -> None:
    """Refuse a model with gated delta nets if the installed packages do not compute them for packed sequences.

    `context`: ranks over which each sequence is divided.
    """
    if model.linear is None:
        return
    if not platform.on_cuda():
        if context > 1:
            raise UserError(
                f"layout.context={context}: on a CPU, linear attention computes whole sequences: set layout.context=1"
            )
        return
    if not gated_delta_net.HAVE_FLA:
        raise UserError(
            "linear attention needs fla-core (flash-linear-attention) on a GPU, and Megatron finds none that fits: "
            "install that of launch/requirements-gpu.txt"
        )
    if not hasattr(gated_delta_net.GatedDeltaNet, "_resolve_cu_seqlens"):
        raise UserError(
            f"megatron-core {version('megatron-core')} computes no packed sequences in linear attention, and does not "
            "divide them (layout.context): install 0.18 or newer"
        )
