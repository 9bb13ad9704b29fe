"""GLM-4.5: grouped-query attention with rotary embedding on half of each head, sigmoid routing, shared experts.

GLM-4.7-Flash (`glm4_moe_lite`) has the layers of DeepSeek-V3 instead.
"""

from typing import Any

from grpo_mp.models import blocks, deepseek, gqa, multi_token_prediction, shared_experts
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of GLM-4.5."""
    hf.expect("hidden_act", "silu")
    return (
        blocks.base_config(hf)
        | gqa.config(hf, **_attention_options(hf), percent=0.5)
        | shared_experts.config(hf)
        | shared_experts.sigmoid_routing(hf)
    )


def rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of GLM-4.5."""
    attention = gqa.rules(hf, range(hf.policy_layers), **_attention_options(hf))
    return [
        *blocks.embedding_and_head(hf),
        *attention,
        *shared_experts.rules(hf),
        shared_experts.bias_rule(hf),
        *multi_token_prediction.rules(hf),
    ]


def rotary(hf: HfConfig) -> dict[str, Any]:
    """Return the rotary arguments of Megatron's GPTModel."""
    return gqa.rotary(hf, percent=0.5)


def lite_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of GLM-4.7-Flash (fields of MLATransformerConfig)."""
    hf.expect("partial_rotary_factor", 1.0)
    if hf.rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise hf.error("partial_rotary_factor of rope_parameters is not supported, only 1.0")
    return deepseek.v3_config(hf)


def _attention_options(hf: HfConfig) -> dict[str, bool]:
    return {"norms": bool(hf.get("use_qk_norm", False)), "bias": bool(hf.get("attention_bias", False))}
