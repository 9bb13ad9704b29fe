"""Find the model's config.json: given on the command line, in model.path, or shipped here by its published name."""

import json
from pathlib import Path

from grpo_mp.errors import UserError
from grpo_mp.models.hf_config import HfConfig

PUBLISHED = Path(__file__).with_name("published")
VARIANTS = ("bf16", "fp8", "base", "instruct", "thinking", "0528", "2507")  # of one architecture


def find_config(model_path: Path, override: Path | None = None) -> tuple[HfConfig, str]:
    """Return the config and where it was found; `override`: a config.json or its folder, used instead.

    Raises UserError where neither has one and none is published under the name of `model_path`.
    """
    path = override or model_path
    file = path if path.suffix == ".json" and path.is_file() else path / "config.json"
    if override or file.is_file():
        return HfConfig.read(file.parent, name=file.name), str(file)
    name, published = path.name.lower(), sorted(file.stem for file in PUBLISHED.glob("*.json"))
    while name.rpartition("-")[2] in VARIANTS:  # 'DeepSeek-R1-0528-BF16' is 'deepseek-r1'
        name = name.rpartition("-")[0]
    if name not in published:
        raise UserError(
            f"model.path={path} is not on this machine, and no config published under that name is known "
            f"({', '.join(published)}): give one with --model-config FILE"
        )
    config = HfConfig(path, published_config(name).values)
    return config, f"the published {name} (model.path is not on this machine)"


def published_config(name: str) -> HfConfig:
    """Read a shipped config by its name."""
    return HfConfig(PUBLISHED / name, json.loads((PUBLISHED / f"{name}.json").read_text()))
