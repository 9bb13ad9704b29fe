"""Write the plan, the report and the timeline of a run into its folder, in processes beside it."""

import atexit
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from grpo_mp.checkpoint.run_state import METRICS
from grpo_mp.utils.files import read_json
from grpo_mp.utils.parsers import DOES_NOT_FIT
from grpo_mp.utils.processes import with_death_signal

REPORT, PLAN = "report.html", "plan.json"
LIMIT_S = 60.0  # for a process that still runs when the run ends
EARLY_LIMIT_S = 20.0  # after a failure: torchrun kills the other ranks 30 s after the first one fails
CPU_LIMIT_S = 600  # of a report that may end after the run
NICENESS = 19
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the run's devices and cores belong to the run


class Reporter:
    """Starts the processes that `monitor.report_every` asks for; `every` is None on ranks that write nothing.

    Use as a context manager around the loop: a loop that raises leaves a report of its steps, too.
    """

    def __init__(self, run_folder: Path, every: int | None, note: Callable[[str], None]) -> None:
        self._folder, self._every, self._note = run_folder, every, note
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # "plan", "report"
        self._ended = False  # the last report was started

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
            # Wait at exit: the error is printed first, and the other ranks stop meanwhile.
            atexit.register(self._finish_at_exit, time.monotonic() + EARLY_LIMIT_S)

    def begin(self, plan_arguments: Sequence[str]) -> None:
        """Plan the run on the machines of `plan_arguments`; without arguments there is no plan."""
        if self._every is not None and plan_arguments:
            settings, file = str(self._folder / "settings.yaml"), str(self._folder / PLAN)
            self._start("plan", ["plan", settings, *plan_arguments, "--json", file])

    def step(self, step: int) -> None:
        """Start report and timeline if they are due after a step, unless the last ones are still being written."""
        if self._every and step % self._every == 0 and self._has_ended("report", 0.0):
            self._start("report", ["report", str(self._folder), "--trace"])

    def end(self, early: bool = False) -> None:
        """Start the report of all steps, which may end after the run."""
        self._ended = True
        if self._every is None:
            return
        if not self._has_ended("report", 0.0 if early else LIMIT_S):
            self._kill("report")
        # Without `early` the timeline is still to get its last spans.
        arguments = ["report", str(self._folder), *(["--trace"] if early else [])]
        self._start("report", arguments, niceness=0, outlives=True)  # the run waits for it

    def finish(self, limit_s: float | None = None, early: bool = False) -> None:
        """Wait for both processes at most `limit_s`; then the plan is killed, and the last report left alone."""
        limit_s = (EARLY_LIMIT_S if early else LIMIT_S) if limit_s is None else limit_s
        if not self._has_ended("plan", 0.0 if early else limit_s):
            self._kill("plan")
        if not self._has_ended("report", limit_s):
            if self._ended:
                self._running.pop("report")
                self._warn(f"report: still being written, see {self._log('report')}")
            else:
                self._kill("report")

    def _start(self, name: str, arguments: Sequence[str], niceness: int = NICENESS, outlives: bool = False) -> None:
        command = [sys.executable, "-m", "grpo_mp", *arguments]
        command = command if outlives else with_death_signal(command)
        try:
            with self._log(name).open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | HIDDEN
                )
            self._running[name] = process
            if outlives:
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
            if niceness:
                os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        except OSError as error:
            self._warn(f"{name}: not started: {error.strerror}")

    def _has_ended(self, name: str, limit_s: float) -> bool:
        """Wait for a process; return whether none runs now, after a note on one that failed."""
        if name not in self._running:
            return True
        try:
            status = self._running[name].wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        del self._running[name]
        if name == "plan" and status == DOES_NOT_FIT:
            self._warn(f"plan: {read_json(self._folder / PLAN).get('verdict')}")
        elif status:
            self._warn(f"{name}: exit status {status}, see {self._log(name)}")
        return True

    def _kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()
        self._warn(f"{name}: was not done when the run ended, and was killed")

    def _finish_at_exit(self, deadline_s: float) -> None:
        with suppress(KeyboardInterrupt):  # nobody waits for it then
            self.finish(max(0.0, deadline_s - time.monotonic()), early=True)

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def _warn(self, text: str) -> None:
        self._note(f"warning: {text}")
