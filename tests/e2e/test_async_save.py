"""A run that is killed while a checkpoint is written in the background goes on from the one before."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from grpo_mp.checkpoint.run_state import MANIFEST, checkpoint_folder, latest_checkpoint
from grpo_mp.monitor.timeline import read_trace
from tests.e2e.conftest import StartJob, outcome
from tests.e2e.jobs import Job, read_jsonl

pytestmark = pytest.mark.slow
STEPS = 3
# Pieces of one row: a save takes long enough to be killed in. Weights are part of it without a reference.
SMALL_PIECES = (
    "algorithm.kl.coef=0",
    "data.eval={}",
    "run.save_every=1",
    f"run.steps={STEPS}",
    "run.piece_bytes=1",
    "run.export=false",
)


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
    second = checkpoint_folder(run, 2)
    job = start_job(f"run.folder={run}", *SMALL_PIECES)
    job.wait_until(lambda: any((second / "policy").glob("*.bin")))
    kill(job)
    job.wait()
    assert not (second / MANIFEST).exists()
    assert latest_checkpoint(run) == checkpoint_folder(run, 1)

    resumed = outcome(start_job(f"run.folder={run}", *SMALL_PIECES))
    assert (resumed.status, resumed.err, resumed.left) == (0, "", [])
    assert "resumes after step 1" in resumed.out
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2, 3]
    assert latest_checkpoint(run) == checkpoint_folder(run, STEPS)
    completed = (second / MANIFEST).stat().st_mtime  # tests/checkpoint/test_save.py holds the writes themselves up
    assert begins(run, "GENERATE")[-1] < completed < begins(run, "TRAIN")[-1]  # of the third step
