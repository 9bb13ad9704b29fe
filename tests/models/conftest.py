"""Configs of every family at tiny sizes that divide over four ranks, except where a test wants otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.models.families import FAMILIES
from grpo_mp.models.hf_config import HfConfig
from tools.tiny.models import PUBLISHED_KEYS, TINY_CONFIGS

GROUPED = {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 4}
LATENT = {"num_hidden_layers": 3, "n_shared_experts": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
SMALL: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 2, "num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 4},
    "qwen3_moe": GROUPED | {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 4},
    "qwen3_next": GROUPED | {"num_experts": 4},
    "qwen3_5_moe_text": GROUPED | {"num_experts": 4},
    "qwen3_5_text": GROUPED,
    "qwen2": GROUPED,
    "llama": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "deepseek_v2": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT,
    "kimi_k2": LATENT,
    "glm4_moe_lite": LATENT,
    "minimax_m2": GROUPED | {"rotary_dim": 2},
    "hy_v3": GROUPED | {"num_hidden_layers": 3},
    "glm4_moe": GROUPED | {"num_hidden_layers": 3, "n_shared_experts": 2},
    "gpt_oss": GROUPED | {"num_local_experts": 4},
}
WIDTHS = {"hidden_size": 8, "intermediate_size": 16, "moe_intermediate_size": 12, "vocab_size": 10}
MakeHf = Callable[..., HfConfig]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_hf() -> MakeHf:

    def make(family: str, **changes: Any) -> HfConfig:
        values = {"model_type": family} | TINY_CONFIGS[family] | PUBLISHED_KEYS.get(family, {}) | WIDTHS | SMALL[family]
        return HfConfig(Path("somewhere"), values | changes)

    return make
