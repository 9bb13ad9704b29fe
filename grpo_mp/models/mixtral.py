"""Mixtral: grouped-query attention, and routed experts in every layer, without shared experts."""

from dataclasses import replace
from typing import Any

from grpo_mp.models import blocks, gqa
from grpo_mp.models.blocks import ExpertNames
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule

DEFAULT_ROPE_THETA = 1e6  # transformers' default for Mixtral
NAMES = ExpertNames(moe_block="block_sparse_moe.", gate="w1", up="w3", down="w2")


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of Mixtral.

    Softmax over the chosen experts equals Mixtral's softmax over all experts, normalized over the chosen ones.
    """
    hf.expect("hidden_act", "silu")
    hf.expect("sliding_window", None)
    return (
        blocks.base_config(hf)
        | gqa.config(hf)
        | blocks.moe_config(hf, hf.int("num_local_experts"), hf.int("intermediate_size"))
        | {"moe_layer_freq": [1] * hf.int("num_hidden_layers"), "moe_router_score_function": "softmax"}
    )


def rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of Mixtral, with the names of published checkpoints."""
    layers = range(hf.int("num_hidden_layers"))
    experts = blocks.experts(
        hf, layers, num_experts=hf.int("num_local_experts"), width=hf.int("intermediate_size"), names=NAMES
    )
    return [*blocks.embedding_and_head(hf), *gqa.rules(hf, layers), *experts]


def rotary(hf: HfConfig) -> dict[str, Any]:
    """Return the rotary arguments of Megatron's GPTModel."""
    return gqa.rotary(replace(hf, values=hf.values | {"rope_theta": hf.get("rope_theta") or DEFAULT_ROPE_THETA}))
