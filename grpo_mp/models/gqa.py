"""Grouped-query attention (Llama, Qwen, Mixtral, GLM), with optional query/key norms, biases and rotary variants."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_mp.models import blocks
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule, Section, Shape

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The only llama3 rope scaling that Megatron supports, apart from its factor, which is free.
LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def config(hf: HfConfig, *, norms: bool = False, bias: bool = False, percent: float = 1.0) -> dict[str, Any]:
    """Return the Megatron settings of attention. `norms`: of queries and keys. `bias`: on all three QKV projections.

    `percent`: share of each head that is rotated, if config.json does not set it.
    """
    return {
        "num_query_groups": hf.int("num_key_value_heads"),
        "kv_channels": hf.head_dim,
        "qk_layernorm": norms,
        "add_qkv_bias": bias,
    } | _rope_scaling(hf, percent)


def _rope_scaling(hf: HfConfig, percent: float) -> dict[str, Any]:
    rope = hf.rope
    kind = rope["rope_type"]
    if kind == "yarn":
        return _yarn(hf, _rotated_share(hf, percent))
    if kind not in ROPE_TYPES:
        raise hf.error(f"rope type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    if kind != "default":
        hf.rope_float("factor")
    for key, value in LLAMA3_ROPE.items() if kind == "llama3" else ():
        if hf.rope_float(key) != value:
            raise hf.error(f"{key}={rope[key]!r} of llama3's rope scaling is not supported, only {value}")
    return {}


def _yarn(hf: HfConfig, share: float) -> dict[str, Any]:
    """Return the settings of yarn (arXiv 2309.00071).

    The attention factor multiplies queries and keys. Here the scale of attention has its square instead, because
    Megatron's fused rotary kernel for packed sequences ignores the factor.
    """
    if share != 1.0:
        raise hf.error(f"yarn with partial_rotary_factor={share} is not supported: Megatron scales whole heads only")
    rope = hf.rope
    return {
        "position_embedding_type": "yarn",
        "softmax_scale": _attention_factor(hf) ** 2 / math.sqrt(hf.head_dim),
        "yarn_rotary_scaling_factor": hf.rope_float("factor"),
        "yarn_original_max_position_embeddings": int(hf.rope_float("original_max_position_embeddings")),
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 1.0,
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
    }


def _attention_factor(hf: HfConfig) -> float:
    """Return yarn's factor of queries and keys as transformers computes it; SGLang must compute the same."""
    rope = hf.rope
    logarithm = 0.1 * math.log(max(hf.rope_float("factor"), 1.0))
    mscale = rope.get("mscale")
    all_dim = rope.get("mscale_all_dim")
    if bool(mscale) != bool(all_dim):
        raise hf.error("yarn with only one of mscale and mscale_all_dim is not supported: set both or none")
    computed = 1.0 + logarithm
    if mscale and all_dim:
        computed = (1.0 + hf.rope_float("mscale") * logarithm) / (1.0 + hf.rope_float("mscale_all_dim") * logarithm)
    factor = computed if rope.get("attention_factor") is None else hf.rope_float("attention_factor")
    in_engines = computed * (1.0 if rope.get("attn_factor") is None else hf.rope_float("attn_factor"))
    if not math.isclose(factor, in_engines, rel_tol=1e-6):
        raise hf.error(
            f"yarn's attention factor is {factor:.6g} for transformers, which reads attention_factor, and "
            f"{in_engines:.6g} for engines, which multiply by attn_factor: remove both, or set both: to F and to "
            f"F / {computed!r}"
        )
    return factor


def dense_config(hf: HfConfig, *, norms: bool = False, bias: bool = False) -> dict[str, Any]:
    """Return the Megatron settings of a decoder with a dense MLP in every layer."""
    hf.expect("hidden_act", "silu")
    ffn = {"ffn_hidden_size": hf.int("intermediate_size")}
    return blocks.base_config(hf) | config(hf, norms=norms, bias=bias) | ffn


def dense_rules(hf: HfConfig, *, norms: bool = False, bias: bool = False) -> list[Rule]:
    """Return the mapping rules of a decoder with a dense MLP in every layer."""
    layers = range(hf.int("num_hidden_layers"))
    attention = rules(hf, layers, norms=norms, bias=bias)
    return [*blocks.embedding_and_head(hf), *attention, *blocks.dense_mlp(hf, layers)]


def rotary(hf: HfConfig, percent: float = 1.0) -> dict[str, Any]:
    """Return the rotary arguments of Megatron's GPTModel.

    `percent`: share of each head that is rotated, if config.json does not set it.
    """
    rope = hf.rope
    arguments = {"rotary_base": rope["rope_theta"], "rotary_percent": _rotated_share(hf, percent)}
    if rope["rope_type"] == "llama3":
        arguments |= {"rope_scaling": True, "rope_scaling_factor": hf.rope_float("factor")}
    if rope["rope_type"] == "linear":
        arguments["seq_len_interpolation_factor"] = hf.rope_float("factor")
    return arguments


def _rotated_share(hf: HfConfig, percent: float) -> float:
    return float(hf.rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or percent)


def rules(
    hf: HfConfig, layers: Sequence[int], *, norms: bool = False, bias: bool = False, gate: bool = False
) -> list[Rule]:
    """Map the fused QKV projection, the output projection, the input norm, and optional query/key norms and biases.

    `gate`: the rows of each query head are followed by those of its output gate.
    """
    hidden = hf.int("hidden_size")
    queries = hf.int("num_attention_heads") * hf.head_dim
    input_norm = HF_LAYER + "input_layernorm.weight"
    mcore = MCORE_LAYER + "self_attention."
    hf_attn = HF_LAYER + "self_attn."
    return [
        _qkv(hf, layers, "weight", (hidden,), gate),
        *([_qkv(hf, layers, "bias", ())] if bias else []),
        *(
            Rule(mcore + f"{x}_layernorm.weight", (hf_attn + f"{x}_norm.weight",), ((hf.head_dim,),), layers=layers)
            for x in ("qk" if norms else "")
        ),
        Rule(mcore + "linear_qkv.layer_norm_weight", (input_norm,), ((hidden,),), layers=layers),
        Rule(mcore + "linear_proj.weight", (hf_attn + "o_proj.weight",), ((hidden, queries),), tp_dim=1, layers=layers),
    ]


def _qkv(hf: HfConfig, layers: Sequence[int], kind: str, columns: Shape, gate: bool = False) -> Rule:
    heads = hf.int("num_attention_heads")
    size = hf.head_dim
    queries = heads * size * (1 + gate)
    keys = hf.int("num_key_value_heads") * size
    # A group has its queries, then their gates, then its key and its value.
    gated = (Section(0, 0, size, heads), Section(0, size, 2 * size, heads), Section(1, 0, keys), Section(2, 0, keys))
    return Rule(
        MCORE_LAYER + f"self_attention.linear_qkv.{kind}",
        tuple(HF_LAYER + f"self_attn.{x}_proj.{kind}" for x in "qkv"),
        tuple((rows, *columns) for rows in (queries, keys, keys)),
        tp_dim=0,
        sections=gated if gate else (),
        layers=layers,
        groups=hf.int("num_key_value_heads"),
    )
