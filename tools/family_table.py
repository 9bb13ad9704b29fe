"""The table of model families, from the registry, the recipes of configs/, and the cases that tests run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from grpo_mp.models.families import FAMILIES, Family
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.model_configs import find_config, named_config, published_config, published_models
from grpo_mp.utils.errors import UserError
from tests.doctor.test_model import IN_ENGINES
from tests.parallel.cases import ALL, LAYOUTS, MODELS
from tests.recipes import FULL_SIZE
from tests.rollout.test_family_engines import FAMILIES as ENGINES
from tests.rollout.test_recorded_loaders import CASES as LOADED

COLUMNS = ("model_type", "architecture", "models", "layouts", "engine", "MTP", "replay", "recipes", "rejected")
ENGINE_ARGUMENTS = {"ep_size": "experts", "attn_dp_size": "attention"}
QUANTIZATIONS = {"fp8": "FP8", "mxfp8": "MXFP8", "compressed-tensors": "INT4"}


def family_rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each family, in the order of the registry."""
    recipes = {path.stem: _model_type(path) for path in FULL_SIZE}
    for name, family in FAMILIES.items():
        hf = _published(name)
        tested = {case.layout for case in ALL if MODELS[case.model][0] in (name, family.transformers_type)}
        moe = bool(family.config(hf).get("num_moe_experts"))
        yield (
            f"`{name}`",
            family.architecture,
            family.models,
            ", ".join(layout for layout in LAYOUTS if layout in tested),
            ", ".join(_engine(name)),
            _multi_token_prediction(family, hf),
            ("R2, R3, R3_keys" if hf.get("index_topk") else "R2, R3") if moe else "",
            ", ".join(f"`{recipe}`" for recipe, model_type in recipes.items() if model_type == name),
            family.rejected,
        )


def _published(name: str) -> HfConfig:
    """Return the config of the first published model of a family that can be trained."""
    configs = (named_config(model) for model in published_models())
    return next(hf for hf in configs if hf.model_type == name)


def _model_type(recipe: Path) -> str:
    hf, _ = find_config(Path(yaml.safe_load(recipe.read_text())["model"]["path"]))
    return hf.model_type


def _engine(name: str) -> Iterator[str]:
    if name in (*IN_ENGINES, *(family for family, _ in ENGINES.values())):
        yield "CPU"
    loaded = [args for model, _, args, _ in LOADED if published_config(model).model_type == name]
    yield from ("tensor",) if loaded else ()
    yield from (word for key, word in ENGINE_ARGUMENTS.items() if any(key in args for args in loaded))
    formats = {args.get("quantization") for args in loaded}
    yield from (word for value, word in QUANTIZATIONS.items() if value in formats)


def _multi_token_prediction(family: Family, hf: HfConfig) -> str:
    if not hf.mtp_layers:
        return ""
    try:
        family.config(replace(hf, trains_mtp=True))
        family.rules(replace(hf, trains_mtp=True))
    except UserError:
        return "kept"
    return "trained"
