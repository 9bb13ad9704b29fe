"""A rank that exits with status 0 before the end of the run is a failure, under either launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mp.distributed.finish_markers import FINISHED_DIR_VARIABLE, mark_finished, ranks_without_marker
from grpo_mp.trainer.exit import exit_on_error
from tests.conftest import TinyRun
from tests.e2e.jobs import LAUNCH

# An exit that no handler of Python sees, unlike SystemExit.
SILENT_EXIT = (
    "import ctypes, os\nif os.environ['RANK'] in {ranks!r}: ctypes.CDLL(None)._exit(0)\ndef f(**_): return []\n"
)


def exit_early_reward(folder: Path, ranks: str) -> str:
    """Return the setting of a reward function that ends these ranks."""
    file = folder / "vanishing.py"
    file.write_text(SILENT_EXIT.format(ranks=ranks))
    return f"reward.functions={{{file}:f: 1.0}}"


def test_launcher_reports_ranks_that_exit_early(tiny_run: TinyRun, tmp_path: Path) -> None:
    command = [*LAUNCH, str(tiny_run.config), f"run.folder={tmp_path / 'run'}", exit_early_reward(tmp_path, "01")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr.startswith(
        "error: rank 0 exited with status 0 before the run finished: look for an exit call"
    )
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
def test_ranks_that_finish_leave_marks(tiny_run: TinyRun, tmp_path: Path) -> None:
    program = (
        "import sys; from grpo_mp.cli.local_launch import start_ranks; "
        "sys.exit(start_ranks(2, sys.argv[1:], 'grpo_mp.train'))"
    )
    command = [sys.executable, "-c", program, str(tiny_run.config), f"run.folder={tmp_path / 'run'}", "--dry-run"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize(("status", "unmarked_ranks"), [(0, []), (2, [0])])
def test_only_exit_status_0_of_the_trainer_leaves_a_mark(
    status: int, unmarked_ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, FINISHED_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit), exit_on_error():
        raise SystemExit(status)
    assert ranks_without_marker(tmp_path, 1) == unmarked_ranks


def test_batch_script_checks_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_ended() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "grpo_mp.cli.slurm_job", "check-finished", str(tmp_path), "3"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    mark_finished(1)  # no launcher named a folder
    monkeypatch.setenv(FINISHED_DIR_VARIABLE, str(tmp_path))
    for rank in (0, 2):
        mark_finished(rank)
    assert ranks_without_marker(tmp_path, 3) == [1]
    process = check_ended()
    assert process.returncode == 2
    assert process.stderr.startswith("error: rank 1 exited with status 0 before the run finished")
    mark_finished(1)
    assert check_ended().returncode == 0
