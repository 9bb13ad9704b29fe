"""Multi-latent attention without a low-rank query projection, hence without query norm (DeepSeek-V2-Lite, Moonlight).

megatron-core 0.19 would add a norm to the query projection, because qk_layernorm asks for one of keys and values.
"""

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class MLAWithoutQueryNorm(MLASelfAttention):
    """Keeps the query projection of the layer spec. megatron-core 0.16 never calls this hook."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        return resolved | {"linear_q_proj": submodules.linear_q_proj}


def without_query_norm(config: TransformerConfig, block: ModuleSpec) -> ModuleSpec:
    """Put that attention into the block's spec if the model has no low-rank queries; return the spec."""
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = MLAWithoutQueryNorm
    return block
