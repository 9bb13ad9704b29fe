"""A run that is killed while a checkpoint is written in the background goes on from the one before."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from grpo_mp.checkpoint.run_state import MANIFEST, checkpoint_folder, latest_checkpoint
from grpo_mp.monitor.timeline import read_trace
from tests.e2e.conftest import StartJob, outcome
from tests.e2e.jobs import Job, read_jsonl

pytestmark = pytest.mark.nightly
STEPS = 3
# Weights are part of a background save without a reference.
SETTINGS = (
    "engine.gpus_per_engine=2",
    "algorithm.kl.coef=0",
    "data.eval={}",
    "run.save_every=1",
    f"run.steps={STEPS}",
    "run.export=false",
)

SMALL_PIECES = """
from grpo_mp.checkpoint import chunk_files
chunk_files.PIECE_BYTES = 1  # pieces of one row: a save takes long enough to be killed in

def none(completions, **_):
    return [0.0] * len(completions)
"""


def kill(job: Job) -> None:
    """All processes at once, as a node that fails."""
    for process in job.alive():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def begins(run: Path, name: str) -> list[float]:
    """Seconds since the epoch at which rank 0 began the spans of this name."""
    events = read_trace(run / "trace" / "rank_0.json")
    return [event["ts"] / 1e6 for event in events if event["ph"] == "B" and event["name"] == name]


def test_a_kill_in_the_background_write_leaves_the_former_checkpoint(start_job: StartJob, tmp_path: Path) -> None:
    run = tmp_path / "run"
    reward = tmp_path / "reward.py"
    reward.write_text(SMALL_PIECES)
    settings = (f"run.folder={run}", f"reward.functions={{{reward}:none: 0.0}}", *SETTINGS)
    second = checkpoint_folder(run, 2)
    job = start_job(*settings)
    job.wait_until(lambda: any((second / "policy").glob("*.bin")))
    kill(job)
    job.wait()
    assert not (second / MANIFEST).exists()
    assert latest_checkpoint(run) == checkpoint_folder(run, 1)

    resumed = outcome(start_job(*settings))
    assert (resumed.status, resumed.err, resumed.left) == (0, "", [])
    assert "resumes after step 1" in resumed.out
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2, 3]
    assert latest_checkpoint(run) == checkpoint_folder(run, STEPS)
    completed = (second / MANIFEST).stat().st_mtime  # tests/checkpoint/test_save.py holds the writes themselves up
    assert begins(run, "GENERATE")[-1] < completed < begins(run, "TRAIN")[-1]  # of the third step
