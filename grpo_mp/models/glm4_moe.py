"""GLM-4.5: grouped-query attention with half of each head rotated, sigmoid routing, shared experts."""

from typing import Any

from grpo_mp.models import blocks
from grpo_mp.models import gqa as grouped
from grpo_mp.models import shared_experts as shared
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Megatron settings."""
    hf.expect("hidden_act", "silu")
    return blocks.base_config(hf) | grouped.config(hf, **_options(hf)) | shared.config(hf) | shared.sigmoid_routing(hf)


def rules(hf: HfConfig) -> list[Rule]:
    """Parameter mapping; the multi-token-prediction layer is not part of the policy."""
    layers = range(hf.int("num_hidden_layers"))
    attention = grouped.rules(hf, layers, **_options(hf))
    return [*blocks.ends(hf), *attention, *shared.rules(hf), shared.bias_rule(hf)]


def rotary(hf: HfConfig) -> dict[str, Any]:
    """Arguments of Megatron's GPTModel."""
    return grouped.rotary(hf, percent=0.5)


def _options(hf: HfConfig) -> dict[str, bool]:
    return {"norms": bool(hf.get("use_qk_norm", False)), "bias": bool(hf.get("attention_bias", False))}
