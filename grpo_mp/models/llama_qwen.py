"""Llama 3, Qwen2.5 and Qwen3: grouped-query decoders that differ in biases and norms; and Qwen3-MoE."""

from typing import Any

from grpo_mp.models import blocks, gqa
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule

NUM_EXPERTS = ("num_experts", "num_local_experts")  # key in transformers 4, key in transformers 5


def llama_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of Llama."""
    hf.expect("attention_bias", False)
    hf.expect("mlp_bias", False)
    return gqa.dense_config(hf)


def qwen2_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of Qwen2."""
    hf.expect("use_sliding_window", False, None)
    return gqa.dense_config(hf, bias=True)


def qwen3_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of dense Qwen3."""
    hf.expect("attention_bias", False)
    hf.expect("use_sliding_window", False, None)
    return gqa.dense_config(hf, norms=True)


def qwen3_moe_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of Qwen3-MoE. Without norm_topk_prob the softmax runs over all experts."""
    moe = moe_layers(hf)
    return (
        qwen3_config(hf)
        | blocks.moe_config(hf, hf.int(*NUM_EXPERTS), hf.int("moe_intermediate_size"))
        | {
            "moe_layer_freq": [int(layer in moe) for layer in range(hf.int("num_hidden_layers"))],
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        }
    )


def qwen3_moe_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of Qwen3-MoE."""
    layers = range(hf.int("num_hidden_layers"))
    moe = moe_layers(hf)
    return [
        *blocks.embedding_and_head(hf),
        *gqa.rules(hf, layers, norms=True),
        *blocks.dense_mlp(hf, [layer for layer in layers if layer not in moe]),
        *blocks.experts(hf, moe, hf.int(*NUM_EXPERTS), hf.int("moe_intermediate_size")),
    ]


def moe_layers(hf: HfConfig) -> tuple[int, ...]:
    """Return the layers with experts."""
    step = int(hf.get("decoder_sparse_step", 1))
    dense = set(hf.get("mlp_only_layers") or ())
    return tuple(
        layer for layer in range(hf.int("num_hidden_layers")) if layer not in dense and (layer + 1) % step == 0
    )
