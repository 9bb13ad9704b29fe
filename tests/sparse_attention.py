"""Families with sparse attention, which the megatron-core of Python 3.11 does not compute."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from grpo_mp.models.families import FAMILIES
from grpo_mp.models.sparse_attention import rules

SPARSE = tuple(name for name, family in FAMILIES.items() if family.rules is rules)
IS_COMPUTED = Version(version("megatron-core")) >= Version("0.19")
needs_megatron = pytest.mark.skipif(not IS_COMPUTED, reason="sparse attention needs megatron-core 0.19")


def marked(families: Iterable[str]) -> list[Any]:
    """Skip the families that the installed megatron-core does not compute."""
    return [pytest.param(name, marks=needs_megatron) if name in SPARSE else name for name in families]
