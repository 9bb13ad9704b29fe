"""Which rank failed first, from the files of an attempt."""

import json
import os
from pathlib import Path

import pytest

from grpo_mp.cli.slurm_job import first_failure
from grpo_mp.cli.slurm_task import error_file

SRUN_LOG = """srun: error: n2: task 5: Killed
srun: Terminating StepId=7.1
srun: error: n1: tasks 0-3: Exited with exit code 1
"""


def write_error(attempt: Path, rank: int, message: str, time: int, **more: object) -> None:
    file = Path(error_file(str(attempt), str(rank)))
    file.write_text(json.dumps({"message": {"message": message}, "rank": rank, **more}))
    os.utime(file, (time, time))


def test_oldest_error_file_is_the_failure(tmp_path: Path) -> None:
    write_error(tmp_path, 2, "error: the engine ended", time=200)
    write_error(tmp_path, 10, "ValueError: odd", time=100)
    (tmp_path / "rank_10.log").write_text("".join(f"line {number}\n\n" for number in range(40)))
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.reason) == (10, "ValueError: odd")
    assert failure.last_lines == tuple(f"line {number}" for number in range(25, 40))
    assert failure.text.startswith("rank 10 failed: ValueError: odd\n  line 25\n")


def test_killed_rank_is_known_from_srun(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text(SRUN_LOG)
    (tmp_path / "rank_5.log").write_text("step 3\n")
    write_error(tmp_path, 0, "error: engine 0: the connection failed", time=100)  # after it, and does not count
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.reason, failure.last_lines) == (5, "Killed on n2", ("step 3",))


NOT_STARTED = """srun: error: Task launch for StepId=7.1 failed on node n2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
"""
ABORTED = """srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: n1: task 0: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.1
"""


@pytest.mark.parametrize("after", ["", ABORTED])
def test_a_step_that_srun_cannot_start_has_lost_a_node(tmp_path: Path, after: str) -> None:
    """Slurm does not know yet that its host is dead; the other tasks are killed by srun."""
    (tmp_path / "srun.log").write_text(NOT_STARTED + after)
    failure = first_failure(tmp_path)
    reason = "node n2: srun could not start its tasks (Communication connection failure)"
    assert (failure.rank, failure.reason, failure.killed) == (None, reason, True)
    assert failure.last_lines[0] == NOT_STARTED.splitlines()[0]


def test_a_lost_node_is_the_failure_though_a_rank_ends_first(tmp_path: Path) -> None:
    """Its peers lose the connection before Slurm says anything."""
    lost = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: Node failure on n2\n"
    (tmp_path / "srun.log").write_text(lost)
    assert (first_failure(tmp_path).reason, first_failure(tmp_path).killed) == ("node n2: Slurm lost it", True)


def test_tasks_that_srun_was_told_to_end_are_not_the_failure(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text(ABORTED)
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.reason, failure.killed) == (None, "srun was told to end its tasks:", True)


def test_a_stop_on_purpose_is_the_failure(tmp_path: Path) -> None:
    """Whatever ended as its consequence, and whenever that was written."""
    (tmp_path / "srun.log").write_text(SRUN_LOG)
    write_error(tmp_path, 0, "error: step 3: the run stops", time=200, may_restart=False)
    write_error(tmp_path, 2, "ValueError: odd", time=100)
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.reason) == (0, "error: step 3: the run stops")
    assert (failure.killed, failure.stopped) == (False, True)
