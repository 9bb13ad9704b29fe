"""Hy3 of Tencent: grouped-query attention with norms of queries and keys, sigmoid routing, shared experts."""

from typing import Any

from grpo_mp.models import blocks, gqa, multi_token_prediction, shared_experts
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule

NAMES = blocks.ExpertNames(router="router.gate")
NUM_EXPERTS = ("num_experts", "num_local_experts")


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of Hy3."""
    _check(hf)
    width = hf.int("moe_intermediate_size")
    return (
        blocks.base_config(hf)
        | gqa.config(hf, norms=True)
        | blocks.moe_config(hf, hf.int(*NUM_EXPERTS), width)
        | shared_experts.sigmoid_routing(hf)
        | {
            "ffn_hidden_size": hf.int("intermediate_size"),
            "moe_layer_freq": shared_experts.layer_kinds(hf),
            "moe_shared_expert_intermediate_size": width * hf.int("num_shared_experts"),
            "moe_router_topk_scaling_factor": hf.float("router_scaling_factor"),
        }
    )


def _check(hf: HfConfig) -> None:
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    hf.expect("mlp_bias", False)
    for key in ("moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        hf.expect(key, True)
    for key in ("qk_norm", "route_norm"):
        if hf.get(key) is not True:
            raise hf.error(f"{key} is not true: engines would compute something else than transformers: set it to true")
    if hf.rope["rope_type"] != "default":
        raise hf.error("engines ignore the rope scaling of Hy3: remove it")


def rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of Hy3."""
    layers = range(hf.policy_layers)
    experts = hf.int(*NUM_EXPERTS)
    width = hf.int("moe_intermediate_size")
    dense = hf.int("first_k_dense_replace")
    moe = layers[dense:]
    shared = width * hf.int("num_shared_experts")
    return [
        *blocks.embedding_and_head(hf),
        *gqa.rules(hf, layers, norms=True),
        *blocks.dense_mlp(hf, layers[:dense]),
        *blocks.experts(hf, moe, experts, width, NAMES),
        *blocks.mlp(hf, moe, shared, prefix="mlp.shared_experts.", hf_prefix="mlp.shared_mlp."),
        shared_experts.expert_bias(moe, experts, "mlp.expert_bias"),
        *multi_token_prediction.rules(hf),
    ]
