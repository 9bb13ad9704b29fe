"""Specifications of engines, as a run with given settings makes them."""

from dataclasses import replace
from typing import Any

from grpo_mp.config import Settings
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.engine_layout import EnginePlacement
from grpo_mp.rollout.rollout import RolloutParts, base_spec, engine_spec


def cuda_spec(settings: Settings, hf: HfConfig, placement: EnginePlacement) -> EngineSpec:
    """Return the specification of an engine on GPUs of a run without stop strings."""
    unused: Any = None
    parts = RolloutParts(hf=hf, tokenizer=unused, scorer=unused)
    base = replace(base_spec(settings.model, settings.max_request_tokens, settings.run.seed, rank=0), cpu=False)
    return engine_spec(base, placement, parts, settings.engine, settings.rollout)
