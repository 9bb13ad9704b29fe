"""Names and paths of extensions: what they load, what is refused, and that no other code knows a name."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import grpo_mp
from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.algorithms.registries import ADVANTAGE_ESTIMATORS, GROUP_FILTERS, POLICY_LOSSES
from grpo_mp.config.registries import DATA_SOURCES, LOGGERS
from grpo_mp.models.families import FAMILIES, MODEL_FAMILIES
from grpo_mp.rewards.base import REWARDS, STEP_REWARDS
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.registry import Registry

PACKAGE = Path(grpo_mp.__file__).parent
REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (
        REWARDS,
        STEP_REWARDS,
        POLICY_LOSSES,
        ADVANTAGE_ESTIMATORS,
        GROUP_FILTERS,
        DATA_SOURCES,
        LOGGERS,
        MODEL_FAMILIES,
    )
}
FILE = """
count = 0
def keep(samples, most=1.0):
    global count
    count += 1
    return count
def none_at_all(): ...
a_number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return "own.py"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_built_in_ones_load_and_fit_their_kind(kind: str) -> None:
    for name in REGISTRIES[kind].built_in:
        REGISTRIES[kind].resolve(name, "test")


def test_names_in_settings_need_no_torch() -> None:
    """A launcher reads settings on a login node: it must not wait for torch."""
    check = "import grpo_mp.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=PACKAGE.parent, check=False).returncode == 0


def test_a_file_is_relative_to_the_working_directory_and_loaded_once(file: str) -> None:
    keep = GROUP_FILTERS.resolve(f"{file}:keep", "test")
    assert [keep([]), GROUP_FILTERS.resolve(f"{file}:keep", "test", {"most": 0.5})([])] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "name", "args", "sentence"),
    [
        ("group filter", "own.py:kep", {}, "x.y 'own.py:kep': own.py has no kep (did you mean keep?)"),
        (
            "group filter",
            "own.py:keep",
            {"mist": 1},
            "x.y 'own.py:keep': as group filter it is called with (samples, mist=): got an unexpected keyword argument",
        ),
        (
            "model family",
            "own.py:keep",
            {},
            "x.y 'own.py:keep': as model family it must be a grpo_mp.models.families.Family, not function",
        ),
    ],
)
def test_what_is_refused(kind: str, name: str, args: Mapping[str, Any], sentence: str, file: str) -> None:
    with pytest.raises(UserError) as refused:
        REGISTRIES[kind].resolve(name, "x.y", args)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


# -- no name is known outside its package -----------------------------------------------------------------------

GENERAL = {"clip", "none"}  # words that mean other things, too
NAMES = PRESETS.keys() | FAMILIES.keys() | POLICY_LOSSES.built_in.keys() - GENERAL
NAMING_MODULES = ("algorithms/presets.py", "algorithms/registries.py", "models/families.py")
CHOICES = ("preset", "policy_loss", "model_type", "family", "source", "metric")  # settings that name one
DEFAULTS = {("algorithms/settings.py", "grpo"), ("algorithms/presets.py", "grpo")}


def known_names(source: str) -> list[str]:
    """Literals that are the name of a preset, family or policy loss, and comparisons of a choice with a literal."""
    values = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            values.append(str(node.value))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            chosen = [side.attr for side in sides if isinstance(side, ast.Attribute) and side.attr in CHOICES]
            literals = [item.value for side in sides for item in ast.walk(side) if isinstance(item, ast.Constant)]
            values += [f"{chosen[0]} == {value}" for value in literals if chosen and isinstance(value, str)]
    return values


def test_no_code_outside_its_package_knows_a_name() -> None:
    values = [
        (str(file.relative_to(PACKAGE)), name)
        for file in PACKAGE.rglob("*.py")
        if not str(file.relative_to(PACKAGE)).startswith(NAMING_MODULES)
        for name in known_names(file.read_text())
    ]
    assert set(values) <= DEFAULTS
