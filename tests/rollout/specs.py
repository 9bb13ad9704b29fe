"""Specifications of engines, as a run with given settings makes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.hf_reader import INDEX
from grpo_mp.config import Settings
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.engine_layout import EnginePlacement
from grpo_mp.rollout.rollout import RolloutParts, base_spec, engine_spec

GPUS_PER_NODE = 8


def first_engine(settings: Settings, hf: HfConfig, folder: Path) -> EngineSpec:
    """Return the specification of a run's first engine on GPUs; of the model's folder there are config and index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf.values))
    (folder / INDEX).write_text(json.dumps({"weight_map": {}}))
    nodes = max(1, settings.engine.gpus_per_engine // GPUS_PER_NODE)
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": folder})})
    return cuda_spec(settings, hf, EnginePlacement(0, 0, 0, nodes))


def cuda_spec(settings: Settings, hf: HfConfig, placement: EnginePlacement) -> EngineSpec:
    """Return the specification of an engine on GPUs of a run without stop strings."""
    unused: Any = None
    parts = RolloutParts(hf=hf, tokenizer=unused, scorer=unused)
    base = replace(base_spec(settings.model, settings.max_request_tokens, settings.run.seed, rank=0), cpu=False)
    return engine_spec(base, placement, parts, settings.engine, settings.rollout)
