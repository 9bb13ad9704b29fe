"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, sigmoid routing, shared experts."""

from typing import Any

from grpo_mp.models import blocks, deepseek_v2, mla, shared_experts
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings (of MLATransformerConfig)."""
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    hf.expect("scoring_func", "sigmoid")
    hf.expect("topk_method", "noaux_tc")
    hf.expect("moe_layer_freq", 1)
    hf.expect("rope_interleave", True)
    return blocks.base_config(hf) | mla.config(hf) | shared_experts.config(hf) | shared_experts.sigmoid_routing(hf)


def rules(hf: HfConfig) -> list[Rule]:
    """Return the parameter mapping; the multi-token-prediction layer is not part of the policy."""
    return [*deepseek_v2.rules(hf), shared_experts.bias_rule(hf)]
