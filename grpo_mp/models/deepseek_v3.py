"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, sigmoid routing, shared experts."""

from typing import Any

from grpo_mp.models import blocks
from grpo_mp.models import mla as latent
from grpo_mp.models import shared_experts as shared
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule


def config(hf: HfConfig) -> dict[str, Any]:
    """Megatron settings (of MLATransformerConfig)."""
    for key, *allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
    ):
        hf.expect(key, *allowed)
    return blocks.base_config(hf) | latent.config(hf) | shared.config(hf) | shared.sigmoid_routing(hf)


def rules(hf: HfConfig) -> list[Rule]:
    """Parameter mapping; the multi-token-prediction layer is not part of the policy."""
    layers = range(hf.int("num_hidden_layers"))
    return [*blocks.ends(hf), *latent.rules(hf, layers), *shared.rules(hf), shared.bias_rule(hf)]
