"""Two steps of a GLM-5 with shared choices of keys: engines compute what the policy does, indexers do not change."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.conftest import StartJob, letters_reward, run_well
from tests.e2e.jobs import read_jsonl
from tests.sparse_attention import needs_megatron
from tools.tiny.arithmetic import vocabulary_words
from tools.tiny.models import make_tiny, make_tokenizer

TOPK = 16


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@needs_megatron
@pytest.mark.parametrize("trains_indexers", [False, True])
def test_an_engine_chooses_the_keys_that_the_policy_does(
    trains_indexers: bool, start_job: StartJob, tmp_path: Path
) -> None:
    """Its keys are replayed; or the policy chooses keys itself, with indexers that learn."""
    keys = ("training.router_replay=R3_keys",)
    learns = ("training.router_replay=R3", "training.megatron_args={dsa_indexer_loss_coeff: 1.0}")
    model = tmp_path / "model"
    run = tmp_path / "run"
    shape = {
        "index_topk": TOPK,
        "pad_token_id": None,
    }  # a padding token's embedding is zero, and all its scores are equal
    make_tiny(model, "glm_moe_dsa", make_tokenizer(vocabulary_words()), initializer_range=0.1, **shape)
    settings = (f"run.folder={run}", f"model.path={model}", "optimizer.lr=0.01", letters_reward(tmp_path))
    run_well(
        start_job(
            *settings,
            "data.eval={}",
            "run.steps=2",
            "run.export=true",
            *(learns if trains_indexers else keys),
            "rollout.max_response_tokens=32",
        )
    )
    steps = read_jsonl(run / "metrics.jsonl")[1:]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/response_length/mean"] > 1.5 * TOPK
        assert step["train/grad_norm"] > 0
        assert step["rollout/samples_without_routed_experts"] == 0
        assert step["mismatch/logprob_abs_diff/mean"] <= 1e-5
        assert step["mismatch/logprob_abs_diff/max"] <= 1e-4
    before, after = map(tensors, (model, run / "final"))
    changed = {name for name, tensor in before.items() if not tensor.equal(after[name])}
    indexers = {name for name in before if ".indexer." in name}
    assert indexers
    assert changed & indexers == (indexers if trains_indexers else set())
    assert all(("train/indexer_loss" in step) == trains_indexers for step in steps)
    assert any(name.endswith("kv_b_proj.weight") for name in changed)
