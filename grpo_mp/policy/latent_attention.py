"""Latent attention whose queries have no low rank, and so no norm of their own (DeepSeek-V2-Lite, Moonlight).

megatron-core 0.19 would give their projection a norm, since qk_layernorm asks for one of the keys and values.
"""

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class PlainQueries(MLASelfAttention):
    """Keeps the query projection that the specification names. 0.16 never asks."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        return chosen | {"linear_q_proj": submodules.linear_q_proj}


def keep_plain_queries(config: TransformerConfig, block: ModuleSpec) -> ModuleSpec:
    """The block's specification with that attention where the model has it."""
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = PlainQueries
    return block
