"""A run on a file system that is really full, and a checkpoint with a wrong bit."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mp.checkpoint.run_state import checkpoint_folder, latest_checkpoint
from tests.e2e.conftest import StartJob, outcome
from tests.e2e.jobs import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")]
STEPS = 5
CHECKPOINT_BYTES = 2_770_000  # of the tiny run


def remount(folder: Path, nbytes: int, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join((f"size={nbytes}", *options)), "tmpfs", folder], check=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose file system has room for two checkpoints and a half."""
    folder = tmp_path / "run"
    folder.mkdir()
    remount(folder, CHECKPOINT_BYTES * 5 // 2)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.nightly
def test_a_run_ends_where_its_disk_is_full_and_resumes_where_there_is_room(run: Path, start_job: StartJob) -> None:
    brief = ("data.eval={}", "run.export=false", "run.save_every=1", f"run.steps={STEPS}")
    ended = outcome(start_job(f"run.folder={run}", *brief))
    assert (ended.status, ended.left) == (2, [])
    told = ended.err.splitlines()
    assert any(line.startswith("error: ") for line in told)
    assert all("No space left on device" in line or "another rank failed" in line for line in told)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000002"]

    # The newest checkpoint is damaged meanwhile.
    remount(run, CHECKPOINT_BYTES * 7, "remount")
    weights = max((checkpoint_folder(run, 2) / "policy").glob("*.bin"), key=lambda file: file.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    resumed = outcome(start_job(f"run.folder={run}", *brief))
    assert resumed.status == 0
    assert all("is cut or damaged after" in line for line in resumed.err.splitlines())  # what was recorded meanwhile
    assert "resumes after step 1" in resumed.out
    damage = f"damaged checkpoint, policy/{weights.name} is missing or cut short: the run resumes from step_000001"
    assert damage in resumed.out
    assert checkpoint_folder(run, 2).with_name("step_000002.damaged").is_dir()
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(STEPS + 1))
    assert latest_checkpoint(run) == checkpoint_folder(run, STEPS)
