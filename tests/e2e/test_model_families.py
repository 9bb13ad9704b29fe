"""Two steps of families whose layers no other run has: an engine computes what the policy does, and is updated."""

from pathlib import Path

import pytest

from tests.e2e.conftest import StartJob, letters_reward, run_well
from tests.e2e.jobs import read_jsonl
from tools.tiny.arithmetic import vocabulary_words
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ONE_ENGINE = ("layout={tensor: 2}", "engine.gpus_per_engine=2")
FAMILIES: dict[str, tuple[str, ...]] = {  # family -> ranks and engines
    "gpt_oss": (),  # an engine a rank
    "minimax_m2": ONE_ENGINE,  # norms over the heads of both ranks
    "hy_v3": (),
    "glm4_moe_lite": (),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_computes_what_the_policy_does(family: str, start_job: StartJob, tmp_path: Path) -> None:
    """Experts are those that the engine chose."""
    model = tmp_path / "model"
    run = tmp_path / "run"
    make_tiny(model, family, make_tokenizer(vocabulary_words()), num_hidden_layers=2, initializer_range=0.1)
    brief = ("data.eval={}", "run.steps=2", "run.export=false", "training.router_replay=R3")
    settings = (f"run.folder={run}", f"model.path={model}", "optimizer.lr=0.01", letters_reward(tmp_path))
    run_well(start_job(*settings, *brief, *FAMILIES[family]))
    steps = read_jsonl(run / "metrics.jsonl")[1:]
    assert len(steps) == 2
    for step in steps:
        assert step["train/grad_norm"] > 0
        assert step["mismatch/logprob_abs_diff/mean"] <= 1e-5
        assert step["mismatch/logprob_abs_diff/max"] <= 1e-4
