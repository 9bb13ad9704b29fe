"""Llama 3 and Qwen2.5: plain grouped-query decoders that differ in the bias of their queries, keys and values."""

from typing import Any

from grpo_mp.models import blocks, gqa
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def llama_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of a Llama."""
    hf.expect("attention_bias", False)
    hf.expect("mlp_bias", False)
    return _config(hf, bias=False)


def llama_rules(hf: HfConfig) -> list[Rule]:
    """Return the parameter mapping of a Llama."""
    return _rules(hf, bias=False)


def qwen2_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of a Qwen2."""
    hf.expect("use_sliding_window", False, None)
    return _config(hf, bias=True)


def qwen2_rules(hf: HfConfig) -> list[Rule]:
    """Return the parameter mapping of a Qwen2."""
    return _rules(hf, bias=True)


def _config(hf: HfConfig, bias: bool) -> dict[str, Any]:
    hf.expect("hidden_act", "silu")
    ffn = {"ffn_hidden_size": hf.int("intermediate_size")}
    return blocks.base_config(hf) | gqa.config(hf, bias=bias) | ffn


def _rules(hf: HfConfig, bias: bool) -> list[Rule]:
    layers = range(hf.int("num_hidden_layers"))
    return [*blocks.embedding_and_head(hf), *gqa.rules(hf, layers, bias=bias), *blocks.dense_mlp(hf, layers)]
