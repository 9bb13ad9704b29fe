"""Which family a Hugging Face folder belongs to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_mp.errors import UserError, nearest
from grpo_mp.models import deepseek_v3, qwen3
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule, expand


@dataclass(frozen=True)
class Family:
    """What one architecture contributes: Megatron settings and the parameter mapping."""

    config: Callable[[HfConfig], dict[str, Any]]
    rules: Callable[[HfConfig], list[Rule]]

    def params(self, hf: HfConfig) -> dict[str, Param]:
        return expand(self.rules(hf))


FAMILIES = {
    "qwen3": Family(qwen3.dense_config, qwen3.dense_rules),
    "qwen3_moe": Family(qwen3.moe_config, qwen3.moe_rules),
    "deepseek_v3": Family(deepseek_v3.config, deepseek_v3.rules),
}


def family_of(hf: HfConfig) -> Family:
    """Raises UserError for an architecture that no family supports."""
    if hf.model_type not in FAMILIES:
        raise UserError(
            f"{hf.path / 'config.json'}: model_type {hf.model_type!r} is not supported"
            f"{nearest(hf.model_type, FAMILIES)}; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[hf.model_type]
