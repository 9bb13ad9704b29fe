"""What runs beside a run: commands of a package that stands in for grpo_mp, writes what it is told, and waits."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from grpo_mp.monitor.reporter import NICENESS, Reporter
from grpo_mp.utils.errors import UserError

STAND_IN = """
import os, sys, time
from pathlib import Path
folder = Path(__file__).parents[1]
while (folder / "wait").exists():
    time.sleep(0.01)
words = [*sys.argv[1:], str(os.getpriority(os.PRIO_PROCESS, 0)), os.environ["CUDA_VISIBLE_DEVICES"], str(os.getpid())]
with (folder / "calls").open("a") as calls:
    calls.write("|".join(words) + "\\n")
sys.exit(int((folder / "status").read_text()))
"""
LIMIT_S = 300.0  # a report runs at the lowest priority


class Run:
    """A run's folder, its notes, and the commands that ran beside it."""

    def __init__(self, folder: Path, every: int | None) -> None:
        (folder / "logs").mkdir()
        (folder / "grpo_mp").mkdir()
        (folder / "grpo_mp" / "__init__.py").touch()
        (folder / "grpo_mp" / "__main__.py").write_text(STAND_IN)
        self.folder, self.notes = folder, list[str]()
        self.ends_with(0)
        self.reporter = Reporter(folder, every, self.notes.append)

    def ends_with(self, status: int) -> None:
        (self.folder / "status").write_text(str(status))

    def hold(self) -> None:
        (self.folder / "wait").touch()

    def release(self) -> None:
        (self.folder / "wait").unlink()

    @property
    def calls(self) -> list[list[str]]:
        """Arguments, niceness, visible devices and process id of each command that has come to its end."""
        file = self.folder / "calls"
        return [line.split("|") for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def running(self) -> list[psutil.Process]:
        """Commands that have not ended: this process's children in the folder."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has just ended
                # One that is ending has no folder any more.
                found += [child] if child.cwd() in ("", str(self.folder)) else []
        return found

    def wait_for_calls(self, count: int) -> None:
        wait_until(lambda: len(self.calls) == count and not self.running)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], Run]:
    monkeypatch.chdir(tmp_path)  # python -m takes the package that is there
    return lambda every: Run(tmp_path, every)


def test_a_report_is_due_every_so_many_steps_and_one_is_written_at_a_time(start: Callable[[int | None], Run]) -> None:
    run = start(2)
    run.hold()
    for step in (1, 2, 3, 4):  # that of step 2 is still being written
        run.reporter.step(step)
    assert len(run.running) == 1
    run.release()
    run.wait_for_calls(1)
    run.reporter.step(5)
    assert not run.running
    run.hold()
    run.reporter.step(6)
    run.release()
    run.wait_for_calls(2)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    run.reporter.end()
    run.reporter.finish()
    run.wait_for_calls(3)
    report = ["report", str(run.folder)]
    assert [call[:-3] for call in run.calls] == [[*report, "--trace"], [*report, "--trace"], report]
    assert [int(call[-3]) for call in run.calls] == [NICENESS, NICENESS, own]  # the run waits for the last one
    assert [call[-2] for call in run.calls] == [""] * 3  # no GPU is its own
    assert not run.notes


FAILING = """
import sys
from pathlib import Path
from grpo_mp.utils.errors import UserError, exit_with
from grpo_mp.monitor import reporter

reporter.EARLY_LIMIT_S = float(sys.argv[2])
error = UserError("entropy collapsed")
reporter.Reporter(Path(sys.argv[1]), 0, lambda note: print(note, file=sys.stderr)).end_after(error)
exit_with(error)
"""


@pytest.mark.parametrize("held", [False, True])
def test_an_error_is_told_before_the_report_is_waited_for(start: Callable[[int | None], Run], held: bool) -> None:
    run = start(0)
    (run.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    if held:
        run.hold()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-P", "-c", FAILING, str(run.folder), "0.5" if held else str(LIMIT_S)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * LIMIT_S)
    notes = [f"warning: report: still being written, see {run.folder / 'logs' / 'report.log'}"] if held else []
    assert (ended.returncode, ended.stderr.splitlines()) == (2, ["error: entropy collapsed", *notes])
    assert len(run.calls) == 1 - held
    if held:
        run.release()
        wait_until(lambda: len(run.calls) == 1)


def test_the_last_report_outlives_a_run_where_it_takes_long(start: Callable[[int | None], Run]) -> None:
    run = start(0)
    run.hold()
    run.reporter.end()
    run.reporter.finish(0.1)
    assert len(run.running) == 1
    assert run.notes == [f"warning: report: still being written, see {run.folder / 'logs' / 'report.log'}"]
    run.release()
    run.wait_for_calls(1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_nobody_waits_after_ctrl_c_or_for_a_report_of_nothing(
    start: Callable[[int | None], Run], error: type[BaseException]
) -> None:
    run = start(0)
    if error is KeyboardInterrupt:
        (run.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    run.reporter.end_after(error("stopped"))
    assert not run.running
    assert not run.calls
