"""Grouped-query attention (Llama, Qwen, Mixtral, GLM): norms of queries and keys, biases and rotary kinds vary."""

from collections.abc import Iterable
from typing import Any

from grpo_mp.models.blocks import HF, MEGATRON
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule, Shape

# What Megatron knows of llama3's rope scaling, beside its factor.
FIXED = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def config(hf: HfConfig, *, norms: bool = False, bias: bool = False) -> dict[str, Any]:
    """Megatron settings; `norms` of queries and keys, `bias` of all three projections.

    Raises UserError for a rotary embedding that Megatron lacks.
    """
    _check_rotary(hf)
    return {
        "num_query_groups": hf.int("num_key_value_heads"),
        "kv_channels": hf.head_dim,
        "qk_layernorm": norms,
        "add_qkv_bias": bias,
    }


def rotary(hf: HfConfig, percent: float = 1.0) -> dict[str, Any]:
    """Arguments of Megatron's GPTModel; `percent`: the share of a head that the family rotates unless config.json says.

    Megatron and Hugging Face rotate the first dimensions of a head, in halves.
    """
    rope = hf.rope
    share = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or percent
    scaled = {"rope_scaling": True, "rope_scaling_factor": hf.rope_float("factor")} if _llama3(rope) else {}
    return {"rotary_base": rope["rope_theta"], "rotary_percent": float(share), **scaled}


def rules(hf: HfConfig, layers: Iterable[int], *, norms: bool = False, bias: bool = False) -> list[Rule]:
    """q, k and v as one projection, the output projection, and the norm before them."""
    hidden, queries, layers = hf.int("hidden_size"), hf.int("num_attention_heads") * hf.head_dim, tuple(layers)
    here, there = MEGATRON + "self_attention.", HF + "self_attn."
    return [
        _fused(hf, layers, "weight", (hidden,)),
        *([_fused(hf, layers, "bias", ())] if bias else []),
        *(
            Rule(here + f"{part}_layernorm.weight", (there + f"{part}_norm.weight",), ((hf.head_dim,),), layers=layers)
            for part in ("qk" if norms else "")
        ),
        Rule(here + "linear_qkv.layer_norm_weight", (HF + "input_layernorm.weight",), ((hidden,),), layers=layers),
        Rule(here + "linear_proj.weight", (there + "o_proj.weight",), ((hidden, queries),), split=1, layers=layers),
    ]


def _fused(hf: HfConfig, layers: tuple[int, ...], kind: str, columns: Shape) -> Rule:
    queries, keys = (hf.int(f"num_{heads}_heads") * hf.head_dim for heads in ("attention", "key_value"))
    return Rule(
        MEGATRON + f"self_attention.linear_qkv.{kind}",
        tuple(HF + f"self_attn.{part}_proj.{kind}" for part in "qkv"),
        tuple((rows, *columns) for rows in (queries, keys, keys)),
        fuse="qkv",
        split=0,
        layers=layers,
        head_dim=hf.head_dim,
    )


def _llama3(rope: dict[str, Any]) -> bool:
    return bool(rope["rope_type"] == "llama3")


def _check_rotary(hf: HfConfig) -> None:
    rope = hf.rope
    if rope["rope_type"] not in ("default", "llama3"):
        raise hf.refusal(f"rope type {rope['rope_type']!r} is not supported, only 'default' or 'llama3'")
    if not _llama3(rope):
        return
    hf.rope_float("factor")
    for key, wanted in FIXED.items():
        if hf.rope_float(key) != wanted:
            raise hf.refusal(f"{key}={rope[key]!r} of llama3's rope scaling is not supported, only {wanted}")
