"""Every recipe in configs/ loads, and says the same again when its resolved form is read."""

from pathlib import Path

import pytest

from grpo_mp.config import dump_settings, load_any_settings

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_loads(path: Path, tmp_path: Path) -> None:
    settings = load_any_settings(path)
    resolved = tmp_path / "settings.yaml"
    resolved.write_text(dump_settings(settings))
    assert load_any_settings(resolved) == settings
