"""Each recipe's trainer on CUDA up to its first kernel: Megatron and TransformerEngine accept its fields, and allocate
what the plan says."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import load_settings
from tests.policy.gpu_python import last_line, transformer_engine

ROOT = Path(__file__).parents[2]
RECIPES = [str(path) for path in sorted((ROOT / "configs").glob("*.yaml")) if path.stem != "tiny_moe"]


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """What one rank of each stage of each recipe allocates."""
    command = [sys.executable, "-m", "tests.policy.rehearse", str(transformer_engine()), *RECIPES]
    return last_line(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: Path(path).stem)
def test_weights_gradients_and_optimizer_take_what_the_plan_says(
    recipe: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    assert len(found[recipe]) == load_settings(Path(recipe)).layout.pipeline
    for rank in found[recipe]:
        allocated = [rank["weights"], rank["gradients"], rank["optimizer"]]
        assert allocated == pytest.approx(rank["planned"], rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: Path(path).stem)
def test_saving_and_loading_copy_nothing_of_the_optimizer_on_the_device(
    recipe: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    aware = load_settings(Path(recipe)).optimizer.megatron.get("use_precision_aware_optimizer", False)
    for rank in found[recipe]:
        assert rank["save"] == rank["load"] == 0
        # Kept are 2 bytes of remainder and two moments of 2; the library's own state_dict copies moments, to 4 each.
        assert rank["plain_save"] == pytest.approx(rank["optimizer"] * 8 / 6 if aware else 0.0)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: Path(path).stem)
def test_the_fused_kernels_are_on(recipe: str, found: dict[str, list[dict[str, Any]]]) -> None:
    experts = load_settings(Path(recipe)).layout.expert > 1
    for rank in found[recipe]:
        assert rank["rope_fused"]
        assert rank["permute_fused"] == experts
        assert rank["layers_that_add_gradients"] == rank["layers"] > 0
