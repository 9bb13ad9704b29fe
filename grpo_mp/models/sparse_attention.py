"""DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses (arXiv 2512.02556, section 2.1).

The indexer scores all keys of a query, and attention computes with the best `index_topk`. In GLM-5.2 only some layers
have an indexer. A layer without one attends to the keys that the last indexer before it chose (IndexShare, arXiv
2603.12201).
"""

from dataclasses import replace
from typing import Any

from grpo_mp.models import deepseek
from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule, Shape

INDEXER = "core_attention.indexer."  # in a Megatron attention
INDEXER_LOSS = "dsa_indexer_loss_coeff"  # Megatron's setting; above 0 indexers are trained
INTERLEAVED = "indexer_rope_interleave"
FULL = "full"  # kinds of layers in indexer_types: with an indexer
SHARED = "shared"  # without one
K_NORM_EPS = 1e-6
# Megatron's latent attention has these norms inside the projections after them, except if it is sparse.
NORMS = {
    "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
    "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
}


def v32_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of DeepSeek-V3.2 (fields of MLATransformerConfig)."""
    hf.expect(INTERLEAVED, False)
    return _config(hf)


def glm_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of GLM-5, 5.1 and 5.2 (fields of MLATransformerConfig)."""
    if hf.get(INTERLEAVED) is not True:
        raise hf.error(f"{INTERLEAVED} is not true, as transformers assumes: set it to true for engines, too")
    return _config(hf)


def _config(hf: HfConfig) -> dict[str, Any]:
    every, first = _schedule(hf)
    return deepseek.v3_config(hf) | {
        "experimental_attention_variant": "dsa",
        "q_lora_rank": hf.int("q_lora_rank"),
        "cp_comm_type": "allgather",  # Megatron's only one for sparse attention
        "dsa_indexer_n_heads": hf.int("index_n_heads"),
        "dsa_indexer_head_dim": hf.int("index_head_dim"),
        "dsa_indexer_topk": hf.int("index_topk"),
        "dsa_indexer_topk_freq": every,
        "dsa_indexer_skip_topk_offset": first,
        "dsa_indexer_rope_interleaved": bool(hf.get(INTERLEAVED)),
        "dsa_indexer_rotate_activation": False,  # orthogonal: scores are equal without it
        "dsa_indexer_k_norm_epsilon": K_NORM_EPS,
        "dsa_indexer_k_norm_fp32": True,
        INDEXER_LOSS: 0.0,
        "dsa_indexer_use_sparse_loss": True,  # over the chosen keys, as the policy attends
    }


def rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of DeepSeek-V3.2 and GLM-5."""
    return [*map(_for_sparse_attention, deepseek.v3_rules(hf)), *_indexer_rules(hf)]


def _for_sparse_attention(rule: Rule) -> Rule:
    for inside, apart in NORMS.items():
        if rule.name.endswith(inside):
            return replace(rule, name=rule.name.removesuffix(inside) + apart)
    # Megatron multiplies with parts of this weight and never calls the layer.
    return replace(rule, adapts=False) if rule.name.endswith("linear_kv_up_proj.weight") else rule


def indexer_layers(hf: HfConfig) -> list[int]:
    """Return the layers of the decoder that have an indexer."""
    return [layer for layer, kind in enumerate(_indexer_types(hf)) if kind == FULL]


def _indexer_rules(hf: HfConfig) -> list[Rule]:
    hidden = hf.int("hidden_size")
    heads = hf.int("index_n_heads")
    width = hf.int("index_head_dim")
    shapes: dict[str, Shape] = {
        "wq_b.weight": (heads * width, hf.int("q_lora_rank")),
        "wk.weight": (width, hidden),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, hidden),
    }
    # The multi-token-prediction layer has an indexer.
    layers = [*indexer_layers(hf), *range(hf.int("num_hidden_layers"), hf.policy_layers)]
    return [
        Rule(
            f"{MCORE_LAYER}self_attention.{INDEXER}{name if 'norm' in name else f'linear_{name}'}",
            (f"{HF_LAYER}self_attn.indexer.{name}",),
            (shape,),
            layers=layers,
            keep_float32="norm" in name,
            adapts=False,
        )
        for name, shape in shapes.items()
    ]


def _indexer_types(hf: HfConfig) -> list[str]:
    layers = hf.int("num_hidden_layers")
    every = hf.get("index_topk_freq") or 1
    listed = hf.get("indexer_types") or [
        {"F": FULL, "S": SHARED}.get(kind, kind) for kind in hf.get("index_topk_pattern") or ()
    ]
    if listed:
        return list(listed)
    return _scheduled(layers, every, hf.int("index_skip_topk_offset")) if every > 1 else [FULL] * layers


def _schedule(hf: HfConfig) -> tuple[int, int]:
    """Return Megatron's schedule: (n, m) gives an indexer to the first m layers and to every n-th layer after them."""
    layers = hf.int("num_hidden_layers")
    kinds = _indexer_types(hf)
    if kinds == [FULL] * layers:
        return 1, 0
    first = kinds.index(SHARED) if SHARED in kinds else 0
    every = (kinds.index(FULL, first) if FULL in kinds[first:] else layers) - first + 1
    if not first or kinds != _scheduled(layers, every, first):
        raise hf.error(
            f"indexer_types or index_topk_pattern does not give each of the {layers} layers an indexer (full) as a "
            "schedule of index_topk_freq and index_skip_topk_offset does, and Megatron knows only schedules"
        )
    return every, first


def _scheduled(layers: int, every: int, first: int) -> list[str]:
    return [SHARED if max(layer + 1 - first, 0) % every else FULL for layer in range(layers)]
