"""A run whose linear layers compute in FP8, sharded over both ranks, with engines that compute in float32."""

from pathlib import Path

import pytest

from tests.e2e.conftest import REWARD, StartJob, outcome
from tests.e2e.jobs import read_jsonl

pytestmark = pytest.mark.slow


def test_a_policy_in_fp8_trains_and_is_told_apart_from_its_engines(start_job: StartJob, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "reward.py").write_text(REWARD)
    settings = (
        f"run.folder={run}",
        "run.steps=2",
        "data.eval={}",
        "layout={tensor: 2, expert: 2}",
        "training.fp8_format=hybrid",
        "sync.check_tolerance=0.25",  # what is allowed without this test model's own, of float32
        f"reward={{functions: {{{tmp_path / 'reward.py'}:letters: 1.0}}}}",
    )
    result = outcome(start_job(*settings))
    assert (result.status, result.err, result.left) == (0, "", []), f"{result.out[-2000:]}\n{result.err}"
    steps = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"]]
    assert [step["step"] for step in steps] == [1, 2]
    # In float32 it is 1e-6.
    assert all(1e-3 < step["mismatch/logprob_abs_diff/mean"] < 0.25 for step in steps)
    assert all(step["train/grad_norm"] > 0 for step in steps)
