"""Grouped-query attention (Llama, Qwen, Mixtral, GLM), with optional query/key norms, biases and rotary variants."""

from collections.abc import Sequence
from typing import Any

from grpo_mp.models import blocks
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule, Section, Shape

# The only llama3 rope scaling that Megatron supports, apart from its factor, which is free.
LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def config(hf: HfConfig, *, norms: bool = False, bias: bool = False) -> dict[str, Any]:
    """Return the Megatron settings of attention. `norms`: of queries and keys. `bias`: on all three QKV projections."""
    rope = hf.rope
    if rope["rope_type"] not in ("default", "llama3"):
        raise hf.error(f"rope type {rope['rope_type']!r} is not supported, only 'default' or 'llama3'")
    if rope["rope_type"] == "llama3":
        hf.rope_float("factor")
        for key, value in LLAMA3_ROPE.items():
            if hf.rope_float(key) != value:
                raise hf.error(f"{key}={rope[key]!r} of llama3's rope scaling is not supported, only {value}")
    return {
        "num_query_groups": hf.int("num_key_value_heads"),
        "kv_channels": hf.head_dim,
        "qk_layernorm": norms,
        "add_qkv_bias": bias,
    }


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
    percent = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or percent
    arguments = {"rotary_base": rope["rope_theta"], "rotary_percent": float(percent)}
    if rope["rope_type"] == "llama3":
        arguments |= {"rope_scaling": True, "rope_scaling_factor": hf.rope_float("factor")}
    return arguments


def rules(
    hf: HfConfig, layers: Sequence[int], *, norms: bool = False, bias: bool = False, gate: bool = False
) -> list[Rule]:
    """Map the fused QKV projection, the output projection, the input norm, and optional query/key norms and biases.

    `gate`: the rows of each query head are followed by those of its output gate.
    """
    hidden, queries = hf.int("hidden_size"), hf.int("num_attention_heads") * hf.head_dim
    input_norm = HF_LAYER + "input_layernorm.weight"
    mcore, hf_attn = MCORE_LAYER + "self_attention.", HF_LAYER + "self_attn."
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
    heads, size = hf.int("num_attention_heads"), hf.head_dim
    queries, keys = heads * size * (1 + gate), hf.int("num_key_value_heads") * size
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
