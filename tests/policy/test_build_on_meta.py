"""Each recipe's trainer as on CUDA, up to its first kernel: Megatron and TransformerEngine accept its config fields and
allocate what the planner says."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import load_settings
from tests.policy.te_stub import last_json_line, te_wheel
from tests.recipes import FULL_SIZE
from tests.sparse_attention import IS_COMPUTED, is_sparse

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPES = [str(path) for path in FULL_SIZE if IS_COMPUTED or not is_sparse(path)]
PLAIN = next(
    recipe for recipe in RECIPES if "qwen3_5_35b_a3b" in recipe
)  # Megatron checks the rows of a gated delta net
IN_FP8 = f"{PLAIN}@fp8"


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.policy.build_on_meta", str(te_wheel()), *RECIPES, IN_FP8]
    return last_json_line(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: Path(path).stem)
def test_memory_equals_the_plan(recipe: str, results: dict[str, list[dict[str, Any]]]) -> None:
    assert len(results[recipe]) == load_settings(Path(recipe)).layout.pipeline
    for rank in results[recipe]:
        allocated = [rank["weights"], rank["gradients"], rank["optimizer"]]
        assert allocated == pytest.approx(rank["planned"], rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: Path(path).stem)
def test_save_and_load_copy_no_optimizer_state_on_the_device(
    recipe: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    bfloat16_moments = load_settings(Path(recipe)).training.megatron_args.get("exp_avg_dtype") == "bfloat16"
    for rank in results[recipe]:
        assert rank["save"] == 0
        assert rank["load"] == 0
        # State: remainder and two moments of 2 bytes each; TransformerEngine's state_dict copies moments to 4 each.
        assert rank["plain_save"] == pytest.approx(rank["optimizer"] * 8 / 6 if bfloat16_moments else 0.0)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: Path(path).stem)
def test_fused_kernels_are_on(recipe: str, results: dict[str, list[dict[str, Any]]]) -> None:
    experts = load_settings(Path(recipe)).layout.expert > 1
    for rank in results[recipe]:
        refused = is_sparse(Path(recipe)) or Path(recipe).stem == "glm_4_7_flash"  # of 20 heads
        assert rank["rope_fused"] != refused
        assert rank["permute_fused"] == experts
        assert rank["layers_that_add_gradients"] == rank["layers"] > 0


def test_fp8_is_the_blockwise_recipe_and_leaves_weights_as_they_are(results: dict[str, list[dict[str, Any]]]) -> None:
    for in_fp8, rank in zip(results[IN_FP8], results[PLAIN], strict=True):
        assert in_fp8 == rank | {"fp8": ["Float8BlockScaling", "E4M3"]}
        assert rank["fp8"] == ["", ""]
