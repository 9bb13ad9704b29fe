"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, sigmoid routing, shared experts."""

from typing import Any

from grpo_mp.models import blocks, mla, shared_experts
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings (of MLATransformerConfig)."""
    for key, *allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
    ):
        hf.expect(key, *allowed)
    return blocks.base_config(hf) | mla.config(hf) | shared_experts.config(hf) | shared_experts.sigmoid_routing(hf)


def rules(hf: HfConfig) -> list[Rule]:
    """Return the parameter mapping; the multi-token-prediction layer is not part of the policy."""
    layers = range(hf.int("num_hidden_layers"))
    return [
        *blocks.embedding_and_head(hf),
        *mla.rules(hf, layers),
        *shared_experts.rules(hf),
        shared_experts.bias_rule(hf),
    ]
