"""Tiny models with the shape of the real ones: ordinary Hugging Face folders with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
GROUPED_QUERY = {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "rope_theta": 10000.0}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 4,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": BASE | GROUPED_QUERY,
    "qwen3_moe": BASE | GROUPED_QUERY | EXPERTS | {"num_experts": 8, "decoder_sparse_step": 1},
    "deepseek_v3": BASE | EXPERTS | LATENT,
}
# Keys that released configs carry and engines read, and that transformers leaves out or renames.
RELEASED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8},
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "ep_size": 1,
        "num_nextn_predict_layers": 0,
    },
}


def make_tiny(
    folder: Path, family: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0, **shape: Any
) -> dict[str, Any]:
    """Write a random model of `family` (a key of SHAPES) with its tokenizer; returns its config.json.

    `shape` overrides any key of the config. Norms and the expert bias are random, too, so that a test sees them.
    """
    values = SHAPES[family] | {"vocab_size": _padded(len(tokenizer)), "eos_token_id": tokenizer.eos_token_id}
    values |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None} | shape
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=torch.float32)
    _randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | RELEASED.get(family, {}) | shape
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.uniform_(0.8, 1.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.05, 0.05)


def _padded(size: int, multiple: int = 16) -> int:
    return -(-size // multiple) * multiple
