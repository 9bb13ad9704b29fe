"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing that is not normalised, shared experts."""

from typing import Any

from grpo_mp.models import blocks, mla, shared_experts
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings (of MLATransformerConfig)."""
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    hf.expect("mlp_bias", False)
    hf.expect("norm_topk_prob", False)
    hf.expect("scoring_func", "softmax")
    hf.expect("topk_method", "greedy", "group_limited_greedy")
    hf.expect("moe_layer_freq", 1)
    group_limited = hf.get("topk_method") == "group_limited_greedy"
    return (
        blocks.base_config(hf)
        | mla.config(hf)
        | shared_experts.config(hf)
        | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
        | (shared_experts.group_limit(hf) if group_limited else {})
    )


def rules(hf: HfConfig) -> list[Rule]:
    """Return the parameter mapping."""
    attention = mla.rules(hf, range(hf.int("num_hidden_layers")))
    return [*blocks.embedding_and_head(hf), *attention, *shared_experts.rules(hf)]
