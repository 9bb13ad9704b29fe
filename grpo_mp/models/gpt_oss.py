"""GPT-OSS: attention sinks, sliding windows in every second layer, and experts with biases and clamped gated units."""

from typing import Any

from grpo_mp.models import blocks, gqa
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER, ExpertNames
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule

SLIDING = "sliding_attention"
FULL = "full_attention"
QUICK_GELU = 1.702  # x * sigmoid(1.702 x), the only factor of Megatron's quick_gelu
NAMES = ExpertNames(router="router", bias=True)


def config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of GPT-OSS.

    A sink is a learned logit of each head, beside those of the keys; its share of the softmax goes to no value. An
    expert computes (up + 1) * gate * sigmoid(1.702 gate), with gate and up clamped.
    """
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", True)
    hf.expect("swiglu_alpha", QUICK_GELU)
    return (
        blocks.base_config(hf)
        | gqa.config(hf, bias=True)
        | blocks.moe_config(hf, hf.int("num_local_experts"), hf.int("intermediate_size"))
        | {
            "ffn_hidden_size": hf.int("intermediate_size"),
            "moe_layer_freq": [1] * hf.int("num_hidden_layers"),
            "moe_router_score_function": "softmax",
            "add_bias_linear": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": hf.float("swiglu_limit"),
            "softmax_type": "learnable",
            "window_size": (hf.int("sliding_window") - 1, 0),  # keys before and after a query
            "window_attn_skip_freq": _windows(hf),
        }
    )


def rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of GPT-OSS. Experts have the names of single matrices, which files hold stacked."""
    layers = range(hf.int("num_hidden_layers"))
    heads = hf.int("num_attention_heads")
    hidden = hf.int("hidden_size")
    mcore = MCORE_LAYER + "self_attention."
    hf_attn = HF_LAYER + "self_attn."
    sinks = Rule(mcore + "core_attention.softmax_offset", (hf_attn + "sinks",), ((heads,),), tp_dim=0, layers=layers)
    return [
        *blocks.embedding_and_head(hf),
        *gqa.rules(hf, layers, bias=True),
        Rule(mcore + "linear_proj.bias", (hf_attn + "o_proj.bias",), ((hidden,),), layers=layers),
        sinks,
        *blocks.experts(hf, layers, hf.int("num_local_experts"), hf.int("intermediate_size"), NAMES),
    ]


def _windows(hf: HfConfig) -> list[int]:
    """Return for each layer whether its attention has a window: without layer_types the first, third, ..."""
    layers = hf.int("num_hidden_layers")
    kinds = hf.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(layers)]
    if len(kinds) != layers or not {SLIDING, FULL}.issuperset(kinds):
        raise hf.error(f"layer_types does not name {SLIDING} or {FULL} for each of the {layers} layers")
    return [int(kind == SLIDING) for kind in kinds]
