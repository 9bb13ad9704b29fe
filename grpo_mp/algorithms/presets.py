"""Published algorithms (presets.yaml) and rollout corrections (corrections.yaml) by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """A published algorithm. `settings`: defaults, which the user's own settings override section by section."""

    source: str
    use: str  # when to choose it
    settings: Tree


def _read(file: str) -> dict[str, Tree]:
    tables: dict[str, Tree] = yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    return tables


PRESETS: dict[str, Preset] = {name: Preset(**entry) for name, entry in _read("presets.yaml").items()}
CORRECTIONS: dict[str, Tree] = _read("corrections.yaml")  # parts of the section `algorithm`


def with_preset(tree: Tree) -> Tree:
    """Merge the user's settings over the preset and the correction that they name.

    `algorithm: dapo` names a preset, too; `algorithm.rollout_correction: icepop` names a correction.
    """
    algorithm = tree.get("algorithm", {})
    if isinstance(algorithm, str):
        algorithm = {"preset": algorithm}
    if not isinstance(algorithm, dict):
        return tree
    preset = PRESETS.get(str(algorithm.get("preset", "grpo")))
    defaults = preset.settings if preset else {}
    if (name := str(algorithm.get("rollout_correction"))) in CORRECTIONS:
        defaults = _merge(defaults, {"algorithm": CORRECTIONS[name]})
        algorithm = {key: value for key, value in algorithm.items() if key != "rollout_correction"}
    return _merge(defaults, tree | {"algorithm": algorithm})


def _merge(defaults: Tree, overrides: Tree) -> Tree:
    """Merge two trees of settings, recursively for sections in both."""
    sections = {
        key: _merge(defaults[key], overrides[key])
        for key in defaults.keys() & overrides.keys()
        if isinstance(defaults[key], dict) and isinstance(overrides[key], dict)
    }
    return defaults | overrides | sections
