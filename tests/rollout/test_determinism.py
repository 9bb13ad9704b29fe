"""Attention that deterministic engines may have: what SGLang refuses, and what it does not look at."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_args import BACKENDS, INVARIANT, INVARIANT_WITH_CACHE, check_determinism
from grpo_mp.utils.errors import UserError

DENSE = HfConfig(Path("published"), {"model_type": "any"})
LATENT = HfConfig(Path("published"), {"model_type": "any", "kv_lora_rank": 512})


def test_the_lists_are_those_of_sglang() -> None:
    """As its source has them, but for devices that this program does not run on."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "srt/arg_groups/choices.py").read_text()
    lists = {
        node.targets[0].id: set(ast.literal_eval(node.value)) - {"ascend", "intel_xpu"}
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }
    assert set(INVARIANT) == lists["DETERMINISTIC_ATTENTION_BACKEND_CHOICES"]
    assert set(INVARIANT_WITH_CACHE) == lists["RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"]


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_that_depends_on_the_batch_is_refused(name: str) -> None:
    """SGLang reads `attention_backend` alone; latent attention has fewer."""
    with pytest.raises(
        UserError, match=rf"engine.args.{name}=flashmla: .* set one of fa3, fa4, flashinfer, triton, or"
    ):
        check_determinism({name: "flashmla"}, DENSE, cpu=False)
    with pytest.raises(UserError, match=rf"engine.args.{name}=flashinfer: .* set one of fa3, fa4, triton with latent"):
        check_determinism({name: "flashinfer"}, LATENT, cpu=False)
    check_determinism({name: "flashinfer"}, DENSE, cpu=False)
    check_determinism({name: "fa3"}, LATENT, cpu=False)
    check_determinism({name: "flashmla"}, LATENT, cpu=True)
    check_determinism({}, LATENT, cpu=False)
