"""The loop in layouts that the other runs of this folder do not have."""

from pathlib import Path

import pytest

from grpo_mp.checkpoint.convert import to_megatron
from tests.conftest import TinyRun
from tests.e2e.conftest import REWARD, StartJob, outcome
from tests.e2e.jobs import read_jsonl

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("parallel", "engine"), [("tensor", ()), ("expert", ("engine.args.ep_size=2",))], ids=["tensor", "expert"]
)
def test_both_ranks_are_one_policy_and_one_engine(
    parallel: str, engine: tuple[str, ...], start_job: StartJob, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Both start from a converted folder, which has no weights that an engine could read; prompts are shared."""
    to_megatron(tiny_run.model, tmp_path / "megatron", lambda done, total: None)
    (tmp_path / "reward.py").write_text(REWARD)
    run = tmp_path / "run"
    layout = (f"layout={{{parallel}: 2}}", "engine.gpus_per_engine=2", *engine, "training.share_prompts=true")
    brief = ("data.eval={}", "run.steps=2", "run.export=false")
    model = f"model.path={tmp_path / 'megatron'}"
    result = outcome(
        start_job(
            f"run.folder={run}", f"reward.functions={{{tmp_path / 'reward.py'}:letters: 1.0}}", model, *layout, *brief
        )
    )
    assert (result.status, result.err, result.left) == (0, "", [])
    steps = read_jsonl(run / "metrics.jsonl")
    assert all(step["train/grad_norm"] > 0 for step in steps[1:])
    assert all(step["sync/check/logprob_abs_diff/mean"] <= 1e-4 for step in steps)
    assert all(step["mismatch/logprob_abs_diff/mean"] <= 1e-4 for step in steps[1:])
    if parallel == "expert":  # every shard is where the engine needs it
        assert all(step["sync/bytes_sent"] == 0 for step in steps)
