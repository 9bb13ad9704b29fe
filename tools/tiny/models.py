"""Tiny models with the architectures of real ones: ordinary Hugging Face folders with random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from grpo_mp.models.families import TRANSFORMERS_NAMES, family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.multi_token_prediction import COPIES

END = "<|im_end|>"
PAD = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
BOXED = "\\boxed{"
# Pieces of a text: a single digit, so that arithmetic sees its columns; a word with its leading space; one character.
PIECES = r"\\boxed\{| ?[A-Za-z]+|[^A-Za-z]"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(
    words: Sequence[str], chat_template: str = CHAT_TEMPLATE, roles: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer of special tokens, ASCII characters, and `words` with a leading space.

    `roles`: special tokens of further roles in `chat_template`. The vocabulary is small so that a tiny policy spends
    its parameters on layers, not on the embedding of unused words. Any ASCII text round-trips; other characters become
    `<|unknown|>`.
    """
    vocabulary = _vocabulary(words)
    vocabulary |= {role: len(vocabulary) + number for number, role in enumerate(roles)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[*ROLES, *roles],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _vocabulary(words: Sequence[str]) -> dict[str, int]:
    """Return token -> id: special tokens first, then characters, then words."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    character_tokens = [byte_level.pre_tokenize_str(chr(code))[0][0] for code in range(128)]
    space = character_tokens[ord(" ")]
    # A capitalized word may begin a text, so it also gets a token without the leading space.
    word_tokens = [
        token for word in words for token in ((word, space + word) if word[0].isupper() else (space + word,))
    ]
    tokens = [PAD, END, UNKNOWN, *ROLES, *character_tokens, BOXED, *word_tokens]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


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
MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
INTERVAL = {"full_attention_interval": 2}  # every second layer has attention; in published models every fourth
GATED_DELTA = INTERVAL | {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERT = {"num_experts": 8, "shared_expert_intermediate_size": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHARED_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 4,
}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
MLA = {
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "attention_bias": True,
    "sliding_window": 8,  # tokens: shorter than the samples of tests
    "swiglu_limit": 0.5,  # low enough for tiny activations to reach it
    "rope_scaling": YARN,
}
# Most sequences are longer than index_topk. A key that no head scores above 0 has score 0: with few heads several keys
# have it, and which of them are chosen is arbitrary.
INDEXER = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 32}
DEEPSEEK_V3 = BASE | MOE | MLA | SHARED_EXPERTS | {"n_group": 4, "topk_group": 2}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": BASE | GROUPED_QUERY,
    "qwen3_moe": BASE | GROUPED_QUERY | MOE | {"num_experts": 8, "decoder_sparse_step": 1},
    "qwen3_next": BASE | GROUPED_QUERY | MOE | GATED_DELTA | SHARED_EXPERT,
    "qwen3_5_moe_text": BASE | GROUPED_QUERY | MOE | GATED_DELTA | SHARED_EXPERT,
    "qwen3_5_text": BASE | GROUPED_QUERY | GATED_DELTA,
    "qwen2": BASE | GROUPED_QUERY,
    "llama": BASE | GROUPED_QUERY | {"rope_scaling": LLAMA3, "max_position_embeddings": 16384},
    "mixtral": BASE | GROUPED_QUERY | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v2": BASE | MOE | MLA | SHARED_EXPERTS | NO_GROUPS | {"norm_topk_prob": False, "topk_method": "greedy"},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3 | INDEXER,
    "glm_moe_dsa": DEEPSEEK_V3
    | NO_GROUPS
    | INDEXER
    | {"rope_scaling": None, "rope_theta": 1e6, "indexer_rope_interleave": True}
    | {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    "kimi_k2": DEEPSEEK_V3 | NO_GROUPS,
    "glm4_moe_lite": DEEPSEEK_V3 | NO_GROUPS | {"rope_scaling": None, "rope_theta": 1e6},
    "minimax_m2": BASE
    | GROUPED_QUERY
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_parameters": HALF_ROTATED, "rotary_dim": 16}
    | {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
    "hy_v3": BASE
    | GROUPED_QUERY
    | MOE
    | {"num_experts": 8, "num_shared_experts": 1, "router_scaling_factor": 2.5, "first_k_dense_replace": 1}
    | {"qk_norm": True, "route_norm": True},
    "glm4_moe": BASE | GROUPED_QUERY | MOE | SHARED_EXPERTS | NO_GROUPS | {"use_qk_norm": True, "attention_bias": True},
    "gpt_oss": BASE | GROUPED_QUERY | GPT_OSS,
}
# Keys of published config.json files that engines read and that transformers drops or renames.
SIGMOID_ROUTING_KEYS = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "ep_size": 1,
    "num_nextn_predict_layers": 0,
}
PUBLISHED_KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"), INTERVAL),
    "qwen3_moe": {"num_experts": 8},
    "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1, "ep_size": 1},
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), SIGMOID_ROUTING_KEYS),
    "kimi_k2": SIGMOID_ROUTING_KEYS | {"model_type": "kimi_k2"},
    "glm4_moe_lite": SIGMOID_ROUTING_KEYS | {"partial_rotary_factor": 1.0},
    "glm4_moe": {"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0},
}


def make_tiny(
    folder: Path, family: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0, **shape: Any
) -> dict[str, Any]:
    """Write a random model of `family` (a key of TINY_CONFIGS) and its tokenizer to `folder`; return its config.json.

    `shape`: overrides of config keys. Norms and biases are also random, so that tests notice if they are ignored.
    """
    config_values = TINY_CONFIGS[family] | {
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config_values |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None} | shape
    torch.manual_seed(seed)
    model_type = TRANSFORMERS_NAMES.get(family, family)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config_values), dtype=torch.float32)
    _randomize_norms_and_biases(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved_config = json.loads((folder / "config.json").read_text()) | PUBLISHED_KEYS.get(family, {}) | shape
    (folder / "config.json").write_text(json.dumps(saved_config, indent=2))
    return saved_config


def add_mtp_layer(folder: Path, seed: int = 1) -> None:
    """Add a random multi-token-prediction layer to a tiny model whose config.json already counts this layer.

    The layer's tensors include copies of the embedding and the output layer, as in published checkpoints but Qwen's.
    """
    hf = HfConfig.read(folder)
    layers = hf.int("num_hidden_layers")
    hidden = hf.int("hidden_size")
    family = family_of(hf)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    count_mtp_layer(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize_norms_and_biases(model)
    prefix = f"model.layers.{layers}."
    file = folder / "model.safetensors"
    with TemporaryDirectory(dir=folder) as longer:
        model.save_pretrained(longer)
        layer = {name: t for name, t in load_file(Path(longer) / file.name).items() if name.startswith(prefix)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{prefix}{name}.weight"] = torch.empty(hidden).uniform_(0.8, 1.2)
    layer[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * config.initializer_range
    tensors = load_file(file)
    for name, copy in ({} if family.mtp_names else COPIES).items():
        layer[prefix + copy] = tensors[name].clone()
    layer = {family.stored_name(hf, name): tensor for name, tensor in layer.items()}
    save_file(tensors | layer, file, metadata={"format": "pt"})


def count_mtp_layer(config: PretrainedConfig) -> None:
    """Count a multi-token-prediction layer as one more of the decoder, so that transformers makes it."""
    config.num_hidden_layers += 1
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if kinds := getattr(config, key, None):
            setattr(config, key, [*kinds, kinds[-1]])


@torch.no_grad()
def _randomize_norms_and_biases(model: torch.nn.Module) -> None:
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.uniform_(0.8, 1.2)
        elif name.endswith((".bias", ".dt_bias", "_proj_bias", ".sinks")):
            tensor.uniform_(-0.3, 0.3)
        elif name.endswith(".A_log"):
            # Slow decay: with that of a new model the state of a gated delta net forgets a token within a few others.
            tensor.uniform_(-5.0, -1.0)
        elif name.endswith(".conv1d.weight"):
            tensor.uniform_(-1.0, 1.0)  # smaller values leave keys near 0, where their norm has huge gradients
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.05, 0.05)
