"""MoE layers with shared experts, after dense first layers (DeepSeek, Kimi, Moonlight, GLM)."""

from collections.abc import Sequence
from typing import Any

from grpo_mp.models import blocks
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of the MLPs, without the routing, which each family adds."""
    return blocks.moe_config(hf, hf.int("n_routed_experts"), hf.int("moe_intermediate_size")) | {
        "ffn_hidden_size": hf.int("intermediate_size"),
        "moe_layer_freq": layer_kinds(hf),
        "moe_shared_expert_intermediate_size": hf.int("moe_intermediate_size") * hf.int("n_shared_experts"),
        "moe_router_topk_scaling_factor": hf.float("routed_scaling_factor"),
    }


def layer_kinds(hf: HfConfig) -> list[int]:
    """Return 1 for each layer with experts, 0 for the dense layers before them.

    Raise an error if mlp_layer_types, which some classes of transformers read instead, names other layers.
    """
    dense = hf.int("first_k_dense_replace")
    layers = hf.int("num_hidden_layers")
    listed = ["dense"] * dense + ["sparse"] * (layers - dense)
    if hf.get("mlp_layer_types", listed) not in (None, listed):
        raise hf.error(
            f"mlp_layer_types, which transformers reads, and first_k_dense_replace={dense}, which engines read, "
            "contradict each other: set both as the weights have them"
        )
    return [int(kind == "sparse") for kind in listed]


def sigmoid_routing(hf: HfConfig) -> dict[str, Any]:
    """Return the settings of sigmoid routing: the expert bias affects which experts are chosen, not their weights."""
    hf.expect("norm_topk_prob", True)
    if hf.int("num_experts_per_tok") == 1:
        raise hf.error("num_experts_per_tok=1 is not supported: Megatron does not normalize the score of one expert")
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    } | group_limit(hf)


def group_limit(hf: HfConfig) -> dict[str, Any]:
    """Return the settings of group-limited routing: experts are chosen from the `topk_group` best groups."""
    num_groups = hf.get("n_group") or 1
    topk_group = hf.get("topk_group") or 1
    if num_groups == topk_group:
        return {}
    return {"moe_router_num_groups": num_groups, "moe_router_group_topk": topk_group}


def rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of the MLPs: dense, routed experts, shared experts."""
    dense = range(hf.int("first_k_dense_replace"))
    moe = _moe_layers(hf)
    width = hf.int("moe_intermediate_size")
    return [
        *blocks.dense_mlp(hf, dense),
        *blocks.experts(hf, moe, hf.int("n_routed_experts"), width),
        *blocks.mlp(hf, moe, width * hf.int("n_shared_experts"), prefix="mlp.shared_experts."),
    ]


def bias_rule(hf: HfConfig) -> Rule:
    """Map the expert bias of sigmoid routing."""
    return expert_bias(_moe_layers(hf), hf.int("n_routed_experts"), "mlp.gate.e_score_correction_bias")


def expert_bias(layers: Sequence[int], experts: int, name: str) -> Rule:
    """Map the expert bias of sigmoid routing. `name`: parameter name within a Hugging Face layer."""
    mcore = MCORE_LAYER + "mlp.router.expert_bias"
    return Rule(mcore, (HF_LAYER + name,), ((experts,),), layers=layers, keep_float32=True)


def _moe_layers(hf: HfConfig) -> range:
    return range(hf.int("first_k_dense_replace"), hf.policy_layers)
