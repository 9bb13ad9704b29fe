"""Finds a model's config.json: on the command line, in model.path, or among the shipped configs by published name."""

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError

PUBLISHED = Path(__file__).with_name("published")
NAMES = Path(__file__).with_name("names.yaml")
NUMBER_FORMATS = ("-bf16", "-fp8", "-fp8-dynamic")  # suffixes of a name that denote only the number format
NEAREST = 5  # number of similar names in the error message
GIVE_CONFIG = "give a config.json with --model-config FILE"


def find_config(
    model_path: Path, override: Path | None = None, setting: str = "model.path", remedy: str = GIVE_CONFIG
) -> tuple[HfConfig, str]:
    """Return the model's config, and a description of its source.

    `override`: a config.json or its folder, used instead of `model_path`. `setting`, `remedy`: the setting's name and
    the advice in the error message. Without a file, the config published under the name of `model_path` is used.
    """
    path = override or model_path
    file = path if path.suffix == ".json" and path.is_file() else path / "config.json"
    if override or file.is_file():
        return HfConfig.read(file.parent, name=file.name), str(file)
    name = published_name(path.name)
    if name is None:
        by_lower = {known.lower(): known for known in published_models()}
        found = difflib.get_close_matches(path.name.lower(), by_lower, n=NEAREST, cutoff=0.0)
        nearest = [by_lower[name] for name in found]
        raise UserError(
            f"{setting}={path} is not on this machine, and no config published under that name is known; the "
            f"nearest known: {', '.join(nearest)}: {remedy}"
        )
    return HfConfig(path, named_config(name).values), f"the published {name} ({setting} is not on this machine)"


def published_name(folder: str) -> str | None:
    """Return the published model that a folder's name denotes, or None."""
    name = folder.lower()
    for ending in sorted(NUMBER_FORMATS, key=len, reverse=True):
        name = name.removesuffix(ending)
    return next((known for known in published_models() if known.lower() == name), None)


def named_config(name: str) -> HfConfig:
    """Return the config of a published model."""
    return HfConfig(Path(name), published_models()[name])


def published_config(file: str) -> HfConfig:
    """Read a shipped config. `file`: its name without suffix."""
    return HfConfig(PUBLISHED / file, json.loads((PUBLISHED / f"{file}.json").read_text()))


@cache
def published_models() -> dict[str, dict[str, Any]]:
    """Return the values of all shipped configs by the published name of their model."""
    return {
        name: published_config(entry["config"]).values | entry.get("differs", {})
        for entry in yaml.safe_load(NAMES.read_text())
        for name in entry["names"]
    }
