"""Two steps of a GLM-5 with shared choices of keys: engines compute what the policy does, and indexers stay as they are."""

from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.conftest import StartJob, letters_reward, run_well
from tests.e2e.jobs import read_jsonl
from tests.sparse_attention import needs_megatron
from tools.tiny.arithmetic import vocabulary_words
from tools.tiny.models import make_tiny, make_tokenizer

TOPK = 16


@needs_megatron
def test_an_engine_chooses_the_keys_that_the_policy_does(start_job: StartJob, tmp_path: Path) -> None:
    model = tmp_path / "model"
    run = tmp_path / "run"
    make_tiny(model, "glm_moe_dsa", make_tokenizer(vocabulary_words()), initializer_range=0.1, index_topk=TOPK)
    settings = (f"run.folder={run}", f"model.path={model}", "optimizer.lr=0.01", letters_reward(tmp_path))
    run_well(start_job(*settings, "data.eval={}", "run.steps=2", "training.router_replay=R3", "rollout.max_response_tokens=32"))
    steps = read_jsonl(run / "metrics.jsonl")[1:]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/response_length/mean"] > 1.5 * TOPK
        assert step["train/grad_norm"] > 0
        assert step["mismatch/logprob_abs_diff/mean"] <= 1e-5
        assert step["mismatch/logprob_abs_diff/max"] <= 1e-4
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run / "final"))
    changed = {name for name, tensor in before.items() if not tensor.equal(after[name])}
    indexers = {name for name in before if ".indexer." in name}
    assert indexers
    assert not changed & indexers
    assert any(name.endswith("kv_b_proj.weight") for name in changed)
