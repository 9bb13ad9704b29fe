"""Which rank failed first, from the files of an attempt."""

import json
import os
from pathlib import Path

from grpo_mp.launch.job import first_failure
from grpo_mp.launch.task import error_file

SRUN_LOG = """srun: error: n2: task 5: Killed
srun: Terminating StepId=7.1
srun: error: n1: tasks 0-3: Exited with exit code 1
"""


def write_error(attempt: Path, rank: int, message: str, time: int) -> None:
    file = Path(error_file(str(attempt), str(rank)))
    file.write_text(json.dumps({"message": {"message": message}}))
    os.utime(file, (time, time))


def test_oldest_error_file_is_the_failure(tmp_path: Path) -> None:
    write_error(tmp_path, 2, "error: the engine ended", time=200)
    write_error(tmp_path, 10, "ValueError: odd", time=100)
    (tmp_path / "rank_10.log").write_text("".join(f"line {number}\n\n" for number in range(40)))
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.reason) == (10, "ValueError: odd")
    assert failure.last_lines == tuple(f"line {number}" for number in range(25, 40))
    assert failure.text().startswith("rank 10 failed: ValueError: odd\n  line 25\n")


def test_killed_rank_is_known_from_srun(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text(SRUN_LOG)
    (tmp_path / "rank_5.log").write_text("step 3\n")
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.reason, failure.last_lines) == (5, "Killed on n2", ("step 3",))


def test_errors_after_a_kill_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text(SRUN_LOG)
    write_error(tmp_path, 0, "error: engine 0: the connection failed", time=100)
    assert first_failure(tmp_path).reason == "Killed on n2"


def test_rank_that_exited_is_known_by_its_error_file(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text("".join(reversed(SRUN_LOG.splitlines(keepends=True))))
    write_error(tmp_path, 0, "ValueError: odd", time=100)
    assert first_failure(tmp_path).rank == 0


def test_otherwise_the_end_of_sruns_log_is_shown(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text("srun: error: no such file\n")
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.last_lines) == (None, ("srun: error: no such file",))


TORN = '{"message": {"message": "error: the eng'


def test_an_error_file_that_is_torn_does_not_count(tmp_path: Path) -> None:
    """The disk was full where its rank ended."""
    write_error(tmp_path, 2, "ValueError: odd", time=200)
    for rank, text in enumerate(("", TORN)):
        Path(error_file(str(tmp_path), str(rank))).write_text(text)
        os.utime(error_file(str(tmp_path), str(rank)), (100, 100))
    assert (first_failure(tmp_path).rank, first_failure(tmp_path).reason) == (2, "ValueError: odd")
    Path(error_file(str(tmp_path), "2")).write_text(TORN)
    assert first_failure(tmp_path).rank is None


def test_srun_may_print_bytes_that_are_no_utf_8(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_bytes(b"caf\xe9: warning\n" + SRUN_LOG.encode())
    assert first_failure(tmp_path).reason == "Killed on n2"
