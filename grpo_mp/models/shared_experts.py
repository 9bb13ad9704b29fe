"""Mixtures behind dense first layers, with shared experts (DeepSeek, Kimi, Moonlight, GLM)."""

from typing import Any

from grpo_mp.models import blocks
from grpo_mp.models.blocks import HF, MEGATRON
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Megatron settings of the layers' MLPs; the routing is the family's."""
    dense = hf.int("first_k_dense_replace")
    return blocks.moe_config(hf, hf.int("n_routed_experts"), hf.int("moe_intermediate_size")) | {
        "ffn_hidden_size": hf.int("intermediate_size"),
        "moe_layer_freq": [int(layer >= dense) for layer in range(hf.int("num_hidden_layers"))],
        "moe_shared_expert_intermediate_size": hf.int("moe_intermediate_size") * hf.int("n_shared_experts"),
        "moe_router_topk_scaling_factor": hf.float("routed_scaling_factor"),
    }


def sigmoid_routing(hf: HfConfig) -> dict[str, Any]:
    """Normalised sigmoid scores; a bias that is no part of them chooses the experts."""
    hf.expect("norm_topk_prob", True)
    if hf.int("num_experts_per_tok") == 1:
        raise hf.refusal("num_experts_per_tok=1 is not supported: Megatron does not normalise the score of one expert")
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    } | group_limit(hf)


def group_limit(hf: HfConfig) -> dict[str, Any]:
    """Experts come from the `topk_group` groups that rank highest, by what is the family's."""
    groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
    if groups == chosen:
        return {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def rules(hf: HfConfig) -> list[Rule]:
    """Parameter mapping of the layers' MLPs."""
    dense, moe = range(hf.int("first_k_dense_replace")), _mixtures(hf)
    width = hf.int("moe_intermediate_size")
    shared = width * hf.int("n_shared_experts")
    return [
        *blocks.dense_mlp(hf, dense),
        *blocks.experts(hf, moe, hf.int("n_routed_experts"), width),
        *blocks.mlp(hf, moe, shared, here="mlp.shared_experts.", there="mlp.shared_experts."),
    ]


def bias_rule(hf: HfConfig) -> Rule:
    """The bias of sigmoid routing."""
    return Rule(
        MEGATRON + "mlp.router.expert_bias",
        (HF + "mlp.gate.e_score_correction_bias",),
        ((hf.int("n_routed_experts"),),),
        layers=tuple(_mixtures(hf)),
        keep_float32=True,
    )


def _mixtures(hf: HfConfig) -> range:
    return range(hf.int("first_k_dense_replace"), hf.int("num_hidden_layers"))
