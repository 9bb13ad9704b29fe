"""Write the report and the timeline of a run in a separate process while the run continues."""

import atexit
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from grpo_mp.checkpoint.run_state import METRICS
from grpo_mp.utils.processes import with_death_signal

REPORT = "report.html"
LIMIT_S = 60.0  # wait for a report process at the end of the run
EARLY_LIMIT_S = 20.0  # same wait after a failure: torchrun kills the other ranks 30 s after the first one fails
CPU_LIMIT_S = 600  # CPU time of a report that may outlive the run
NICENESS = 19
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the run's devices and cores belong to the run


class Reporter:
    """Starts `grpo-mp report` after every `every` steps and at the end of the run.

    `every`: 0: only at the end; None: never, as on all ranks but rank 0. Use as a context manager around the training
    loop: if the loop raises, the finished steps are reported.
    """

    def __init__(self, run_folder: Path, every: int | None, note: Callable[[str], None]) -> None:
        self._folder = run_folder
        self._every = every
        self._note = note
        self._log = run_folder / "logs" / "report.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False  # whether the last report was started

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        metrics = self._folder / METRICS
        has_steps = metrics.exists() and metrics.stat().st_size > 0
        if self._every is not None and isinstance(error, Exception) and has_steps:
            if not self._ended:
                self.end(early=True)
            # Waiting in atexit lets the error be printed first and the other ranks stop meanwhile.
            atexit.register(self._finish_at_exit, time.monotonic() + EARLY_LIMIT_S)

    def step(self, step: int) -> None:
        """Start report and timeline if they are due, unless the previous ones are still being written."""
        if self._every and step % self._every == 0 and self._has_ended(0.0):
            self._start("--trace")

    def end(self, early: bool = False) -> None:
        """Start the last report, which may outlive the run. `early`: the run ends before its last step."""
        self._ended = True
        if self._every is None:
            return
        if not self._has_ended(0.0 if early else LIMIT_S):
            self._kill()
        # After a normal end the timeline still lacks its last spans. niceness 0, because the run waits for the report.
        self._start(*(["--trace"] if early else []), niceness=0, outlives=True)

    def finish(self, limit_s: float | None = None, early: bool = False) -> None:
        """Wait at most `limit_s` seconds. After that the last report continues; any other report is killed."""
        limit_s = (EARLY_LIMIT_S if early else LIMIT_S) if limit_s is None else limit_s
        if self._has_ended(limit_s):
            return
        if self._ended:
            self._process = None
            self._note(f"warning: report: still being written, see {self._log}")
        else:
            self._kill()

    def _start(self, *options: str, niceness: int = NICENESS, outlives: bool = False) -> None:
        command = [sys.executable, "-m", "grpo_mp", "report", str(self._folder), *options]
        command = command if outlives else with_death_signal(command)
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | HIDDEN
                )
            if outlives:
                resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
            if niceness:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
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

    def _kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()
        self._process = None
        self._note("warning: report: was not done when the run ended, and was killed")

    def _finish_at_exit(self, deadline_s: float) -> None:
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the wait
            self.finish(max(0.0, deadline_s - time.monotonic()), early=True)
