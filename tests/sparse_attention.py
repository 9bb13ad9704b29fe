"""Families with sparse attention, which the megatron-core of Python 3.11 does not compute."""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from grpo_mp.models.families import FAMILIES
from grpo_mp.models.sparse_attention import rules
from grpo_mp.planner.model_configs import find_config

SPARSE = tuple(name for name, family in FAMILIES.items() if family.rules is rules)
IS_COMPUTED = Version(version("megatron-core")) >= Version("0.19")
needs_megatron = pytest.mark.skipif(not IS_COMPUTED, reason="sparse attention needs megatron-core 0.19")


def marked(families: Iterable[str]) -> list[Any]:
    """Skip the families that the installed megatron-core does not compute."""
    return [pytest.param(name, marks=needs_megatron) if name in SPARSE else name for name in families]


def is_sparse(recipe: Path) -> bool:
    """Is a recipe's model of such a family?"""
    hf, _ = find_config(Path(yaml.safe_load(recipe.read_text())["model"]["path"]))
    return hf.model_type in SPARSE
