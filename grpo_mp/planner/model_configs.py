"""Where a plan takes the model's config from: a file, the run's own folder, or a published config shipped here."""

import json
from pathlib import Path

from grpo_mp.errors import UserError
from grpo_mp.models.hf_config import HfConfig

FOLDER = Path(__file__).with_name("published")
VARIANTS = ("bf16", "fp8", "base", "instruct", "thinking", "0528", "2507")  # of one architecture


def find_config(path: Path, given: Path | None = None) -> tuple[HfConfig, str]:
    """The config of `model.path`, and where it was found. `given`: a config.json or its folder, used instead.

    Raises UserError where none of the three places has one.
    """
    wanted = given or path
    folder = wanted.parent if wanted.suffix == ".json" and wanted.is_file() else wanted
    if wanted.suffix == ".json" and wanted.is_file() and wanted.name != "config.json":
        return HfConfig(folder, json.loads(wanted.read_text())), str(wanted)
    if given or (folder / "config.json").is_file():
        return HfConfig.read(folder), str(folder / "config.json")
    file = FOLDER / f"{_architecture(path.name)}.json"
    if not file.is_file():
        raise UserError(
            f"model.path={path} is not on this machine, and no config published under that name is known "
            f"({', '.join(published_names())}): give one with --model-config FILE"
        )
    return HfConfig(
        path, json.loads(file.read_text())
    ), f"the published {file.stem} (model.path is not on this machine)"


def published_names() -> tuple[str, ...]:
    """The shipped configs."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.json")))


def published(name: str) -> HfConfig:
    """A shipped config by its name."""
    return HfConfig(FOLDER / name, json.loads((FOLDER / f"{name}.json").read_text()))


def _architecture(name: str) -> str:
    name = name.lower()
    while name.rpartition("-")[2] in VARIANTS:
        name = name.rpartition("-")[0]
    return name
