"""Llama 3 and Qwen2.5: plain grouped-query decoders that differ in the bias of their queries, keys and values."""

from typing import Any

from grpo_mp.models import gqa
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def llama_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of a Llama."""
    hf.expect("attention_bias", False)
    hf.expect("mlp_bias", False)
    return gqa.dense_config(hf)


def llama_rules(hf: HfConfig) -> list[Rule]:
    """Return the parameter mapping of a Llama."""
    return gqa.dense_rules(hf)


def qwen2_config(hf: HfConfig) -> dict[str, Any]:
    """Return the Megatron settings of a Qwen2."""
    hf.expect("use_sliding_window", False, None)
    return gqa.dense_config(hf, bias=True)


def qwen2_rules(hf: HfConfig) -> list[Rule]:
    """Return the parameter mapping of a Qwen2."""
    return gqa.dense_rules(hf, bias=True)
