"""DeepSeek-V2, V3 and R1, Kimi-K2, Moonlight: multi-head latent attention (MLA) and shared experts."""

from collections.abc import Sequence
from typing import Any

from grpo_mp.models import blocks, multi_token_prediction, shared_experts
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule, Shape


def mla_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of latent attention (fields of MLATransformerConfig), rotary embedding included."""
    return {
        "multi_latent_attention": True,
        "num_query_groups": hf.int("num_attention_heads"),
        "qk_layernorm": True,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf.int("kv_lora_rank"),
        "qk_head_dim": hf.int("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": hf.int("qk_rope_head_dim"),
        "v_head_dim": hf.int("v_head_dim"),
    } | _mla_rotary(hf)


def mla_rules(hf: HfConfig, layers: Sequence[int]) -> list[Rule]:
    """Map the down and up projections with their norms, the output projection, and the input norm."""
    hidden = hf.int("hidden_size")
    heads = hf.int("num_attention_heads")
    nope = hf.int("qk_nope_head_dim")
    rope = hf.int("qk_rope_head_dim")
    value = hf.int("v_head_dim")
    rank = hf.int("kv_lora_rank")
    q_rows = heads * (nope + rope)
    queries: list[tuple[str, str, Shape, int | None]] = [("linear_q_proj.weight", "q_proj.weight", (q_rows, hidden), 0)]
    if hf.get("q_lora_rank") is not None:
        q_rank = hf.int("q_lora_rank")
        queries = [
            ("linear_q_down_proj.weight", "q_a_proj.weight", (q_rank, hidden), None),
            ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight", (q_rank,), None),
            ("linear_q_up_proj.weight", "q_b_proj.weight", (q_rows, q_rank), 0),
        ]
    table = [
        *queries,
        ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", (rank + rope, hidden), None),
        ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight", (rank,), None),
        ("linear_kv_up_proj.weight", "kv_b_proj.weight", (heads * (nope + value), rank), 0),
        ("linear_proj.weight", "o_proj.weight", (hidden, heads * value), 1),
    ]
    norm = "input_layernorm.weight"
    mcore = MCORE_LAYER + "self_attention."
    hf_attn = HF_LAYER + "self_attn."
    return [
        Rule(MCORE_LAYER + norm, (HF_LAYER + norm,), ((hidden,),), layers=layers),
        *(
            Rule(
                mcore + name,
                (hf_attn + hf_name,),
                (shape,),
                tp_dim=tp_dim,
                layers=layers,
                load_group="latent_down" if name.endswith("_down_proj.weight") else "",
            )
            for name, hf_name, shape, tp_dim in table
        ),
    ]


def _mla_rotary(hf: HfConfig) -> dict[str, Any]:
    rope = hf.rope
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"], "rotary_scaling_factor": 1.0}
    if rope["rope_type"] != "yarn":
        raise hf.error(f"rope type {rope['rope_type']!r} is not supported, only 'default' or 'yarn'")
    for key, supported in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, supported) != supported:
            raise hf.error(f"{key}={rope[key]!r} of yarn is not supported: remove it")
    # transformers ignores mscale unless mscale_all_dim is set, and then uses 1.0.
    mscale = rope.get("mscale")
    all_dim = rope.get("mscale_all_dim")
    if all_dim and not mscale:
        raise hf.error("yarn with mscale_all_dim but without mscale is not supported: set both")
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": hf.rope_float("factor"),
        "original_max_position_embeddings": int(hf.rope_float("original_max_position_embeddings")),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(mscale) if mscale and all_dim else 1.0,
        "mscale_all_dim": float(all_dim or 0.0),
    }


def v2_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of DeepSeek-V2 (fields of MLATransformerConfig)."""
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    hf.expect("mlp_bias", False)
    hf.expect("norm_topk_prob", False)
    hf.expect("scoring_func", "softmax")
    hf.expect("topk_method", "greedy", "group_limited_greedy")
    hf.expect("moe_layer_freq", 1)
    group_limited = hf.get("topk_method") == "group_limited_greedy"
    return (
        blocks.base_config(hf)
        | mla_config(hf)
        | shared_experts.config(hf)
        | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
        | (shared_experts.group_limit(hf) if group_limited else {})
    )


def v2_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of DeepSeek-V2."""
    attention = mla_rules(hf, range(hf.policy_layers))
    return [*blocks.embedding_and_head(hf), *attention, *shared_experts.rules(hf)]


def v3_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of DeepSeek-V3 (fields of MLATransformerConfig)."""
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    hf.expect("scoring_func", "sigmoid")
    hf.expect("topk_method", "noaux_tc")
    hf.expect("moe_layer_freq", 1)
    hf.expect("rope_interleave", True)
    return blocks.base_config(hf) | mla_config(hf) | shared_experts.config(hf) | shared_experts.sigmoid_routing(hf)


def v3_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of DeepSeek-V3."""
    return [*v2_rules(hf), shared_experts.bias_rule(hf), *multi_token_prediction.rules(hf)]
