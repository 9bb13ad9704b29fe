"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing that is not normalised, shared experts."""

from typing import Any

from grpo_mp.models import blocks
from grpo_mp.models import mla as latent
from grpo_mp.models import shared_experts as shared
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Megatron settings (of MLATransformerConfig)."""
    for key, *allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("norm_topk_prob", False),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy", "group_limited_greedy"),
        ("moe_layer_freq", 1),
    ):
        hf.expect(key, *allowed)
    limited = hf.get("topk_method") == "group_limited_greedy"
    return (
        blocks.base_config(hf)
        | latent.config(hf)
        | shared.config(hf)
        | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
        | (shared.group_limit(hf) if limited else {})
    )


def rules(hf: HfConfig) -> list[Rule]:
    """Parameter mapping."""
    return [*blocks.ends(hf), *latent.rules(hf, range(hf.int("num_hidden_layers"))), *shared.rules(hf)]
