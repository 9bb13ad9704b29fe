"""Write the report and the timeline of a run in a separate process while the run continues."""

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_mp.checkpoint.run_state import METRICS
from grpo_mp.utils.processes import with_death_signal

LIMIT_S = 60.0  # wait for a report process at the end of the run
EARLY_LIMIT_S = 20.0  # same wait after a failure: torchrun kills the other ranks 30 s after the first one fails
NICENESS = 19
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the run's devices and cores belong to the run


class Reporter:
    """Starts `grpo-mp report` after every `every` steps and at the end of the run.

    `every`: 0: only at the end; None: never, as on all ranks but rank 0.
    """

    def __init__(self, run_folder: Path, every: int | None, note: Callable[[str], None]) -> None:
        self._folder = run_folder
        self._every = every
        self._note = note
        self._log = run_folder / "logs" / "report.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._has_last = False  # whether the last report was started

    def step(self, step: int) -> None:
        """Start report and timeline if they are due, unless the previous ones are still being written."""
        if self._every and step % self._every == 0 and self._has_ended(0.0):
            self._start("--trace")

    def end(self, early: bool = False) -> None:
        """Start the last report, which may outlive the run. `early`: the run ends before its last step."""
        if self._every is not None:
            self.finish(0.0 if early else LIMIT_S)
            # After a normal end the timeline still lacks its last spans. niceness 0: the run waits for the report.
            self._start(*(["--trace"] if early else []), niceness=0, outlives=True)
        self._has_last = True

    def end_after(self, error: BaseException) -> None:
        """Report the finished steps of a run that failed. The wait at the exit lets the error be printed first."""
        metrics = self._folder / METRICS
        if self._every is not None and isinstance(error, Exception) and metrics.exists() and metrics.stat().st_size:
            if not self._has_last:
                self.end(early=True)
            atexit.register(self.finish, EARLY_LIMIT_S)

    def finish(self, limit_s: float = LIMIT_S) -> None:
        """Wait at most `limit_s` seconds. After that the last report continues; any other report is killed."""
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the wait
            if self._has_ended(limit_s):
                return
        if self._process and self._has_last:
            self._note(f"warning: report: still being written, see {self._log}")
        elif self._process:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self, *options: str, niceness: int = NICENESS, outlives: bool = False) -> None:
        command = [sys.executable, "-m", "grpo_mp", "report", str(self._folder), *options]
        command = command if outlives else with_death_signal(command)
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | HIDDEN
                )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        except OSError as error:
            self._note(f"warning: report: not started: {error.strerror}")

    def _has_ended(self, limit_s: float) -> bool:
        """Wait at most `limit_s` seconds for the process and note a failure; return whether no process is left."""
        if self._process is None:
            return True
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        self._process = None
        if status:
            self._note(f"warning: report: exit status {status}, see {self._log}")
        return True
