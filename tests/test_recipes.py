"""Every recipe in configs/ loads, and says the same again when its resolved form is read."""

import re
from pathlib import Path

import pytest

from grpo_mp.config import dump_settings, load_any_settings, load_settings
from grpo_mp.errors import UserError
from grpo_mp.monitor.guards import MetricGuards
from tests.recipes import PIPELINES, RL, SECTIONS, SFT


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.stem)
def test_files_that_a_recipe_names_are_there(path: Path) -> None:
    for name in re.findall(r"\b(?:launch|configs)/\w+\.(?:sh|yaml)", path.read_text()):
        assert (path.parents[1] / name).is_file(), name


def test_there_are_recipes() -> None:
    assert RL
    assert SFT
    assert PIPELINES


@pytest.mark.parametrize("path", [*RL, *SFT], ids=lambda path: path.stem)
def test_a_recipe_loads(path: Path, tmp_path: Path) -> None:
    settings = load_any_settings(path)
    resolved = tmp_path / "settings.yaml"
    resolved.write_text(dump_settings(settings))
    assert load_any_settings(resolved) == settings


@pytest.mark.parametrize("path", RL, ids=lambda path: path.stem)
def test_a_recipe_stops_where_its_reward_collapses(path: Path) -> None:
    """And at once neither where it learns nor where a step is bad."""
    guards = MetricGuards(load_settings(path).monitor.guards)
    for step in range(1, 101):
        assert guards.check(step, {"reward/mean": 0.5 + step / 250 - (step == 50), "train/entropy": 0.2}) == []

    def collapse() -> None:
        for step in range(101, 131):
            guards.check(step, {"reward/mean": 0.0, "train/entropy": 0.2})

    with pytest.raises(UserError, match=r"reward/mean fell by .* the run stops"):
        collapse()
