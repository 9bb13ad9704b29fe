"""DeepSeek-V3 and R1: latent attention, dense first layers, group-limited sigmoid routing, a shared expert."""

from typing import Any

from grpo_mp.errors import UserError
from grpo_mp.models import blocks
from grpo_mp.models.blocks import HF, MEGATRON
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Megatron settings (of MLATransformerConfig)."""
    for key, *allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("norm_topk_prob", True),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
    ):
        hf.expect(key, *allowed)
    dense = hf.int("first_k_dense_replace")
    return (
        blocks.base_config(hf)
        | blocks.moe_config(hf, hf.int("n_routed_experts"))
        | _attention(hf)
        | _rotary(hf)
        | {
            "ffn_hidden_size": hf.int("intermediate_size"),
            "moe_layer_freq": [int(layer >= dense) for layer in range(hf.int("num_hidden_layers"))],
            "moe_shared_expert_intermediate_size": hf.int("moe_intermediate_size") * hf.int("n_shared_experts"),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_num_groups": hf.int("n_group"),
            "moe_router_group_topk": hf.int("topk_group"),
            "moe_router_topk_scaling_factor": hf.float("routed_scaling_factor"),
        }
    )


def rules(hf: HfConfig) -> list[Rule]:
    """Parameter mapping; the multi-token-prediction layer is not part of the policy."""
    layers, dense = range(hf.int("num_hidden_layers")), hf.int("first_k_dense_replace")
    experts, moe = hf.int("n_routed_experts"), range(dense, hf.int("num_hidden_layers"))
    shared = hf.int("moe_intermediate_size") * hf.int("n_shared_experts")
    bias = Rule(
        MEGATRON + "mlp.router.expert_bias",
        (HF + "mlp.gate.e_score_correction_bias",),
        ((experts,),),
        layers=tuple(moe),
        keep_float32=True,
    )
    return [
        *blocks.ends(hf),
        *_attention_rules(hf, tuple(layers)),
        *blocks.dense_mlp(hf, range(dense)),
        *blocks.experts(hf, moe, experts),
        bias,
        *blocks.mlp(hf, moe, shared, here="mlp.shared_experts.", there="mlp.shared_experts."),
    ]


def _attention(hf: HfConfig) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "num_query_groups": hf.int("num_attention_heads"),
        "qk_layernorm": True,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf.int("kv_lora_rank"),
        "qk_head_dim": hf.int("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": hf.int("qk_rope_head_dim"),
        "v_head_dim": hf.int("v_head_dim"),
    }


def _rotary(hf: HfConfig) -> dict[str, Any]:
    rope = hf.rope
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"], "rotary_scaling_factor": 1.0}
    if rope["rope_type"] != "yarn":
        raise UserError(f"{hf.path / 'config.json'}: rope type {rope['rope_type']!r} is not supported, only yarn")
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast", 32)),
        "beta_slow": float(rope.get("beta_slow", 1)),
        "mscale": float(rope.get("mscale", 1.0)),
        "mscale_all_dim": float(rope.get("mscale_all_dim", 0.0)),
    }


def _attention_rules(hf: HfConfig, layers: tuple[int, ...]) -> list[Rule]:
    hidden, heads = hf.int("hidden_size"), hf.int("num_attention_heads")
    nope, rope, value = hf.int("qk_nope_head_dim"), hf.int("qk_rope_head_dim"), hf.int("v_head_dim")
    q_rank, kv_rank = hf.int("q_lora_rank"), hf.int("kv_lora_rank")
    here, there = MEGATRON + "self_attention.", HF + "self_attn."
    table: list[tuple[str, str, tuple[int, ...], int | None]] = [
        (here + "linear_q_down_proj.weight", there + "q_a_proj.weight", (q_rank, hidden), None),
        (here + "linear_q_up_proj.layer_norm_weight", there + "q_a_layernorm.weight", (q_rank,), None),
        (here + "linear_q_up_proj.weight", there + "q_b_proj.weight", (heads * (nope + rope), q_rank), 0),
        (here + "linear_kv_down_proj.weight", there + "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), None),
        (here + "linear_kv_up_proj.layer_norm_weight", there + "kv_a_layernorm.weight", (kv_rank,), None),
        (here + "linear_kv_up_proj.weight", there + "kv_b_proj.weight", (heads * (nope + value), kv_rank), 0),
        (here + "linear_proj.weight", there + "o_proj.weight", (hidden, heads * value), 1),
        (MEGATRON + "input_layernorm.weight", HF + "input_layernorm.weight", (hidden,), None),
    ]
    return [Rule(name, (hf_name,), (shape,), split=split, layers=layers) for name, hf_name, shape, split in table]
