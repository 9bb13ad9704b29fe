"""A rank that ends with status 0 and without having come to its end is a failure, whoever started it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mp.distributed.exit_marks import MARKS_VARIABLE, mark_finished, ranks_without_mark
from grpo_mp.trainer.exit import exit_on_error
from tests.conftest import TinyRun
from tests.e2e.jobs import LAUNCH

# What no handler of Python sees: not SystemExit, not os._exit.
VANISH = "import ctypes, os\nif os.environ['RANK'] in {ranks!r}: ctypes.CDLL(None)._exit(0)\ndef f(**_): return []\n"


def vanishing(folder: Path, ranks: str) -> str:
    file = folder / "vanishing.py"
    file.write_text(VANISH.format(ranks=ranks))
    return f"reward.functions={{{file}:f: 1.0}}"


def test_the_launcher_sees_ranks_that_vanish(tiny_run: TinyRun, tmp_path: Path) -> None:
    command = [*LAUNCH, str(tiny_run.config), f"run.folder={tmp_path / 'run'}", vanishing(tmp_path, "01")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: rank 0 ended with status 0 before the run did: something that it called ")
    assert ended.stderr.count("\n") == 1


def test_what_ends_well_leaves_marks(tiny_run: TinyRun, tmp_path: Path) -> None:
    command = [*LAUNCH, str(tiny_run.config), f"run.folder={tmp_path / 'run'}", "--dry-run"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("status", "left"), [(0, []), (2, [0])])
def test_an_exit_of_the_trainer_itself(
    status: int, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, MARKS_VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit), exit_on_error():
        raise SystemExit(status)
    assert ranks_without_mark(tmp_path, 1) == left


def test_the_batch_script_asks_for_marks(tmp_path: Path) -> None:
    def ask() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "grpo_mp.launch.job", "ended", str(tmp_path), "3"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for rank in (0, 2):
        mark_finished(rank, {MARKS_VARIABLE: str(tmp_path)})
    mark_finished(1, {})
    assert ranks_without_mark(tmp_path, 3) == [1]
    answer = ask()
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: rank 1 ended with status 0 before the run did")
    mark_finished(1, {MARKS_VARIABLE: str(tmp_path)})
    assert ask().returncode == 0
