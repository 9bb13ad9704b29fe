"""Attention that deterministic engines may have: what SGLang refuses, and what it does not look at."""

from pathlib import Path

import pytest

from grpo_mp.errors import UserError
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.determinism import BACKENDS, INVARIANT, INVARIANT_WITH_CACHE, check_determinism

DENSE = HfConfig(Path("published"), {"model_type": "any"})
LATENT = HfConfig(Path("published"), {"model_type": "any", "kv_lora_rank": 512})


def test_the_lists_are_those_of_sglang() -> None:
    """But for devices that this program does not run on, and what its plugin adds on a CPU."""
    from sglang.srt.arg_groups import choices

    elsewhere = {"ascend", "intel_xpu", "torch_native"}
    assert set(INVARIANT) == set(choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES) - elsewhere
    assert set(INVARIANT_WITH_CACHE) == set(choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND) - elsewhere


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
