"""Published algorithms by name, read from presets.yaml."""

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


PRESETS: dict[str, Preset] = {
    name: Preset(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")).items()
}


def with_preset(tree: Tree) -> Tree:
    """Merge the user's settings over the preset that they name; `algorithm: dapo` names a preset, too."""
    algorithm = tree.get("algorithm", {})
    if isinstance(algorithm, str):
        algorithm = {"preset": algorithm}
    preset = PRESETS.get(str(algorithm.get("preset", "grpo"))) if isinstance(algorithm, dict) else None
    return _merge(preset.settings if preset else {}, tree | {"algorithm": algorithm})


def _merge(defaults: Tree, overrides: Tree) -> Tree:
    """Merge two trees of settings, recursively for sections in both."""
    sections = {
        key: _merge(defaults[key], overrides[key])
        for key in defaults.keys() & overrides.keys()
        if isinstance(defaults[key], dict) and isinstance(overrides[key], dict)
    }
    return defaults | overrides | sections
