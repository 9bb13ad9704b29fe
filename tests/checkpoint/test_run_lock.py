"""The lock of a run folder between processes: held, waited for, and gone with a process that is killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mp.checkpoint.run_lock import LOCK, run_lock
from grpo_mp.utils.errors import UserError

HOLD = """
import os, sys, time
from pathlib import Path
from grpo_mp.checkpoint.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    child = os.fork()  # as a writer of checkpoints that outlives its rank
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    """A process that holds the lock, and has a child."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        yield process
        process.kill()
        os.kill(child, 9)


def test_a_second_job_is_refused_by_the_name_of_the_first(
    tmp_path: Path, holder: "subprocess.Popen[str]", caplog: pytest.LogCaptureFixture
) -> None:
    sentence = rf"run: another job writes there \(host .*, process {holder.pid}\): stop it, or choose another run.fol"
    with pytest.raises(UserError, match=sentence), run_lock(tmp_path / "run", wait_s=0.5):
        pass
    assert len(caplog.messages) == 1
    assert f"process {holder.pid}" in (tmp_path / "run" / LOCK).read_text()
    with run_lock(tmp_path / "other", wait_s=0):
        pass


def test_the_lock_of_a_killed_job_is_gone_while_its_child_lives(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    holder.kill()
    with run_lock(tmp_path / "run", wait_s=60):
        assert (tmp_path / "run" / LOCK).read_text().endswith(f"process {os.getpid()}\n")
