"""Who failed first, from what an attempt leaves behind."""

import json
import os
from pathlib import Path

from grpo_mp.launch.failure import error_file, first_failure

SRUN = """srun: error: n2: task 5: Killed
srun: Terminating StepId=7.1
srun: error: n1: tasks 0-3: Exited with exit code 1
"""


def leave(attempt: Path, rank: int, message: str, when: int) -> None:
    file = Path(error_file(str(attempt), str(rank)))
    file.write_text(json.dumps({"message": {"message": message}}))
    os.utime(file, (when, when))


def test_the_first_message_counts(tmp_path: Path) -> None:
    leave(tmp_path, 2, "error: the engine ended", when=200)
    leave(tmp_path, 10, "ValueError: odd", when=100)
    (tmp_path / "rank_10.log").write_text("".join(f"line {number}\n\n" for number in range(40)))
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.what) == (10, "ValueError: odd")
    assert failure.lines == tuple(f"line {number}" for number in range(25, 40))
    assert failure.text().startswith("rank 10 failed: ValueError: odd\n  line 25\n")


def test_a_killed_rank_is_known_from_srun(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text(SRUN)
    (tmp_path / "rank_5.log").write_text("step 3\n")
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.what, failure.lines) == (5, "Killed on n2", ("step 3",))


def test_what_others_say_after_a_kill_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text(SRUN)
    leave(tmp_path, 0, "error: engine 0: the connection failed", when=100)
    assert first_failure(tmp_path).what == "Killed on n2"


def test_a_rank_that_ended_by_itself_is_known_by_its_message(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text("".join(reversed(SRUN.splitlines(keepends=True))))
    leave(tmp_path, 0, "ValueError: odd", when=100)
    assert first_failure(tmp_path).rank == 0


def test_without_either_the_end_of_sruns_log_is_shown(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text("srun: error: no such file\n")
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.lines) == (None, ("srun: error: no such file",))
