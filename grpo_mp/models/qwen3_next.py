"""Qwen3-Next and Qwen3.5: gated delta nets (arXiv 2412.06464) in most layers, gated attention in every fourth."""

from collections.abc import Sequence
from typing import Any

from grpo_mp.models import blocks, gqa, llama_qwen, multi_token_prediction
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule, Section

LINEAR = "linear_attention"
FULL = "full_attention"
INTERVAL = 4  # without layer_types and full_attention_interval, every fourth layer has full attention


def dense_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of a dense Qwen3.5."""
    return _config(hf) | {"ffn_hidden_size": hf.int("intermediate_size")}


def moe_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of Qwen3-Next, or of a Qwen3.5 with experts."""
    moe = llama_qwen.moe_layers(hf)
    return (
        _config(hf)
        | blocks.moe_config(hf, hf.int(*llama_qwen.NUM_EXPERTS), hf.int("moe_intermediate_size"))
        | {
            "ffn_hidden_size": hf.get("intermediate_size") or hf.int("moe_intermediate_size"),
            "moe_layer_freq": [int(layer in moe) for layer in range(hf.int("num_hidden_layers"))],
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
            "moe_shared_expert_intermediate_size": hf.int("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }
    )


def _config(hf: HfConfig) -> dict[str, Any]:
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    linear = _layers(hf, LINEAR)
    if not linear:
        raise hf.error(f"layer_types names no {LINEAR}: use the family qwen3 or qwen3_moe")
    return (
        blocks.base_config(hf)
        | gqa.config(hf, norms=True, percent=0.25)
        | {
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(layer in linear) for layer in range(hf.int("num_hidden_layers"))],
            "linear_conv_kernel_dim": hf.int("linear_conv_kernel_dim"),
            "linear_key_head_dim": hf.int("linear_key_head_dim"),
            "linear_value_head_dim": hf.int("linear_value_head_dim"),
            "linear_num_key_heads": hf.int("linear_num_key_heads"),
            "linear_num_value_heads": hf.int("linear_num_value_heads"),
        }
    )


def dense_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of a dense Qwen3.5."""
    return [*_attention(hf, _separate_projections), *blocks.dense_mlp(hf, range(hf.policy_layers))]


def moe_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of a Qwen3.5 with experts."""
    return [*_attention(hf, _separate_projections), *_mlps(hf)]


def next_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of Qwen3-Next."""
    return [*_attention(hf, _projections_by_key_head), *_mlps(hf)]


def rotary(hf: HfConfig) -> dict[str, Any]:
    """Return the rotary arguments of Megatron's GPTModel."""
    return gqa.rotary(hf, percent=0.25)


def _layers(hf: HfConfig, kind: str) -> list[int]:
    interval = INTERVAL if hf.get("full_attention_interval") is None else hf.int("full_attention_interval")
    if interval < 1:
        raise hf.error(f"full_attention_interval={interval}: give a number of layers of at least 1")
    count = hf.int("num_hidden_layers")
    kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    if hf.get("layer_types", kinds) not in (None, kinds):
        raise hf.error(
            f"layer_types does not name {FULL} for every {interval}th (full_attention_interval) of the {count} layers "
            f"and {LINEAR} for the others, and engines read only the interval: set both as the weights have them"
        )
    if hf.trains_mtp and kinds[-1] != FULL:
        raise hf.error(
            f"the last of layer_types is {LINEAR}, but the multi-token-prediction layer needs a last layer with "
            f"{FULL}: set model.mtp_loss_scaling_factor to 0"
        )
    ahead = [FULL] * (hf.policy_layers - count)
    return [layer for layer, found in enumerate([*kinds, *ahead]) if found == kind]


def _mlps(hf: HfConfig) -> list[Rule]:
    hidden = hf.int("hidden_size")
    decoder = range(hf.int("num_hidden_layers"))
    moe = (*llama_qwen.moe_layers(hf), *range(len(decoder), hf.policy_layers))
    dense = [layer for layer in decoder if layer not in moe]
    shared = HF_LAYER + "mlp.shared_expert"
    return [
        *(blocks.dense_mlp(hf, dense) if dense else []),  # Qwen3.5 with experts has no width of dense layers
        *blocks.experts(hf, moe, hf.int(*llama_qwen.NUM_EXPERTS), hf.int("moe_intermediate_size")),
        *blocks.mlp(hf, moe, hf.int("shared_expert_intermediate_size"), "mlp.shared_experts.", "mlp.shared_expert."),
        Rule(MCORE_LAYER + "mlp.shared_experts.gate_weight", (f"{shared}_gate.weight",), ((1, hidden),), layers=moe),
    ]


def _attention(hf: HfConfig, projections: Any) -> list[Rule]:
    linear = _layers(hf, LINEAR)
    hidden = hf.int("hidden_size")
    window = hf.int("linear_conv_kernel_dim")
    heads, keys, values = _sizes(hf)
    mcore = MCORE_LAYER + "self_attention."
    hf_net = HF_LAYER + "linear_attn."
    norm = HF_LAYER + "input_layernorm.weight"
    qkv = _in_turn(0, (keys, keys, values))
    return [
        *blocks.embedding_and_head(hf),
        *multi_token_prediction.rules(hf),
        *gqa.rules(hf, _layers(hf, FULL), norms=True, gate=True),
        Rule(mcore + "in_proj.layer_norm_weight", (norm,), ((hidden,),), layers=linear),
        projections(hf, linear),
        Rule(
            mcore + "conv1d.weight",
            (hf_net + "conv1d.weight",),
            ((2 * keys + values, 1, window),),
            tp_dim=0,
            sections=qkv,
            layers=linear,
        ),
        *(Rule(mcore + x, (hf_net + x,), ((heads,),), tp_dim=0, layers=linear) for x in ("A_log", "dt_bias")),
        Rule(mcore + "out_norm.weight", (hf_net + "norm.weight",), ((values // heads,),), layers=linear),
        Rule(mcore + "out_proj.weight", (hf_net + "out_proj.weight",), ((hidden, values),), tp_dim=1, layers=linear),
    ]


def _separate_projections(hf: HfConfig, layers: Sequence[int]) -> Rule:
    """Map Qwen3.5's projections of qkv, z, b and a; Megatron has the rows q, k, v, z, b, a."""
    heads, keys, values = _sizes(hf)
    sections = (
        *_in_turn(0, (keys, keys, values)),
        *(Section(i, 0, n) for i, n in ((1, values), (2, heads), (3, heads))),
    )
    return _in_proj(hf, layers, {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}, sections)


def _projections_by_key_head(hf: HfConfig, layers: Sequence[int]) -> Rule:
    """Map Qwen3-Next's projections: rows q, k, v, z of each key head in turn, and b, a of each key head in turn."""
    heads, keys, values = _sizes(hf)
    key_heads = hf.int("linear_num_key_heads")
    key = keys // key_heads
    value = values // key_heads
    gates = heads // key_heads
    sections = (
        *_in_turn(0, (key, key, value, value), parts=key_heads),
        *_in_turn(1, (gates, gates), parts=key_heads),
    )
    return _in_proj(hf, layers, {"qkvz": 2 * (keys + values), "ba": 2 * heads}, sections)


def _in_proj(hf: HfConfig, layers: Sequence[int], rows: dict[str, int], sections: tuple[Section, ...]) -> Rule:
    return Rule(
        MCORE_LAYER + "self_attention.in_proj.weight",
        tuple(f"{HF_LAYER}linear_attn.in_proj_{x}.weight" for x in rows),
        tuple((count, hf.int("hidden_size")) for count in rows.values()),
        tp_dim=0,
        sections=sections,
        layers=layers,
    )


def _in_turn(tensor: int, sizes: Sequence[int], parts: int = 1) -> tuple[Section, ...]:
    """Return sections of `sizes` rows that follow each other in each of `parts` parts of a Hugging Face tensor."""
    return tuple(Section(tensor, sum(sizes[:i]), sum(sizes[: i + 1]), parts) for i in range(len(sizes)))


def _sizes(hf: HfConfig) -> tuple[int, int, int]:
    """Return the number of value heads, the rows of all key heads, and the rows of all value heads."""
    heads = hf.int("linear_num_value_heads")
    key_heads = hf.int("linear_num_key_heads")
    return heads, key_heads * hf.int("linear_key_head_dim"), heads * hf.int("linear_value_head_dim")
