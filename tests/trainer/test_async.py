"""What an asynchronous run trains on does not depend on who was faster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyRun

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "runs", "steps", "replay", "budget"),
    [
        pytest.param(1, 3, 40, "none", None, marks=pytest.mark.nightly),
        pytest.param(3, 3, 20, "R3", None, marks=pytest.mark.nightly),
        (3, 3, 20, "R3", 4),
        pytest.param(3, 20, 200, "R3", 4, marks=pytest.mark.nightly),
    ],
)
def test_runs_under_random_delays_are_the_same(
    tiny_run: TinyRun, tmp_path: Path, staleness: int, runs: int, steps: int, replay: str, budget: int | None
) -> None:
    """With a budget of tokens every token says which weights drew it, and those are the same, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    command += ["tests.trainer.async_on_ranks", str(tiny_run.config), str(tmp_path)]
    command += ["--runs", str(runs), "--steps", str(steps), "--staleness", str(staleness)]
    command += ["--replay", replay, *(["--tokens-ahead", str(budget)] if budget else [])]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900 + runs * steps)
    assert process.returncode == 0, process.stderr[-3000:]
    hashes = json.loads((tmp_path / "runs.json").read_text())
    assert len(hashes) == runs
    assert len(set(hashes[0])) == steps + 1  # of every step's batch, and the weights
    assert all(other == hashes[0] for other in hashes)
