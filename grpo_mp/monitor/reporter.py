"""Writes the plan, the report and the timeline of a run into its folder, by processes beside it."""

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
from grpo_mp.monitor.run_folder import PLAN
from grpo_mp.utils.files import read_json
from grpo_mp.utils.parsers import DOES_NOT_FIT
from grpo_mp.utils.processes import with_death_signal

REPORT = "report.html"
EARLY_LIMIT_S = 20.0  # of a run that ends early: torchrun kills its ranks 30 s after the first one fails
NICENESS = 19
LIMIT_S = 60.0  # for one that is still running when the run ends
CPU_LIMIT_S = 600  # of one that may end after the run
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the run's devices and cores are not its own


class SideProcess:
    """Starts `python -m grpo_mp ARGUMENTS`, one at a time, with its output in a log file of the run."""

    def __init__(self, name: str, log: Path, explain: Callable[[int], str | None] | None = None) -> None:
        """Take what it is called in a note, and where its output goes.

        `explain`: returns the note of an exit status that is not 0; None: it is none.
        """
        self._name, self._log, self._explain = name, log, explain or self.say_status
        self._process: subprocess.Popen[bytes] | None = None
        self._outlives = False

    def start(self, arguments: Sequence[str], niceness: int = NICENESS, outlives: bool = False) -> str | None:
        """Start it, unless the last one is still at work; return a note where that one failed or this cannot start.

        `outlives`: it may end after the run, and is given CPU_LIMIT_S seconds of a processor.
        """
        note = self._note()
        if self._process is not None:
            return note
        self._outlives = outlives
        try:
            with self._log.open("wb") as log:
                command = [sys.executable, "-m", "grpo_mp", *arguments]
                command = command if outlives else with_death_signal(command)
                environment = os.environ | HIDDEN
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            if outlives:
                resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
            if niceness:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        except OSError as error:
            return f"{self._name}: not started: {error.strerror}"
        return note

    def finish(self, limit_s: float = LIMIT_S) -> str | None:
        """Wait for the last one; return a note where it failed.

        After `limit_s` one that may end after the run is left to itself, another is ended.
        """
        if self._process is None:
            return None
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            if self._outlives:
                self._process = None
                return f"{self._name}: still being written, see {self._log}"
            self._process.kill()
            self._process.wait()
            self._process = None
            return f"{self._name}: not done {limit_s:g} s after the run: it was ended"
        return self._note()

    def _note(self) -> str | None:
        """Return why the last one failed, if it has, and forget it once it has ended."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._process = None
        return self._explain(status) if status else None

    def say_status(self, status: int) -> str:
        """Return the note of an exit status that says nothing more."""
        return f"{self._name}: exit status {status}, see {self._log}"


class Reporter:
    """Starts what `monitor.report_every` asks for; `every` is None where this rank is to write nothing.

    Use as a context manager around the loop: one that ends by an error leaves a report of its steps, too.
    """

    def __init__(self, run_folder: Path, every: int | None, note: Callable[[str], None]) -> None:
        """Take the run's folder, and what shows a failure."""
        self._folder, self._every, self._note, self._ended = run_folder, every, note, False
        logs = run_folder / "logs"
        self._plan = SideProcess("plan", logs / "plan.log", self._explain_plan)
        self._report = SideProcess("report", logs / "report.log")

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Begin what an error would leave unwritten; who has pressed Ctrl-C waits for nothing.

        The process waits for it as it exits: the error is told before, and the ranks of the job stop meanwhile.
        """
        if self._every is not None and isinstance(error, Exception) and self._has_steps():
            if not self._ended:
                self.end(early=True)
            atexit.register(self._finish_at_exit, time.monotonic() + EARLY_LIMIT_S)

    def begin(self, plan_arguments: Sequence[str]) -> None:
        """Plan the run in a process beside it. `plan_arguments`: its machines, see `machine_options`; none: no plan."""
        if self._every is not None and plan_arguments:
            settings, file = str(self._folder / "settings.yaml"), str(self._folder / PLAN)
            self._show(self._plan.start(["plan", settings, *plan_arguments, "--json", file]))

    def step(self, step: int) -> None:
        """Write report and timeline anew where they are due after a step, unless the last are still being written."""
        if self._every and step % self._every == 0:
            self._begin_report("--trace")

    def end(self, early: bool = False) -> None:
        """Begin the report of all steps that are done; the timeline's last spans are still to come, unless `early`."""
        self._ended = True
        if self._every is not None:
            before = self._report.finish(0.0 if early else LIMIT_S)
            self._show(None if early else before)  # the one that begins now says more
            options = ["--trace"] if early else []
            self._begin_report(*options, niceness=0, outlives=True)  # the run waits for it

    def finish(self, limit_s: float | None = None, early: bool = False) -> None:
        """Wait for what is being written, at most `limit_s` for each; the last report is left to itself then.

        A run that ends `early` waits less: who ended it may soon kill it.
        """
        limit_s = (EARLY_LIMIT_S if early else LIMIT_S) if limit_s is None else limit_s
        self._show(self._plan.finish(0.0 if early else limit_s))
        self._show(self._report.finish(limit_s))

    def _explain_plan(self, status: int) -> str | None:
        """Return why a run does not fit, or why there is no plan."""
        if status != DOES_NOT_FIT:
            return self._plan.say_status(status)
        return f"plan: {read_json(self._folder / PLAN).get('verdict')}"

    def _finish_at_exit(self, deadline_s: float) -> None:
        with suppress(KeyboardInterrupt):  # nobody waits for it then
            self.finish(max(0.0, deadline_s - time.monotonic()), early=True)

    def _begin_report(self, *options: str, niceness: int = NICENESS, outlives: bool = False) -> None:
        self._show(self._report.start(["report", str(self._folder), *options], niceness, outlives))

    def _has_steps(self) -> bool:
        file = self._folder / METRICS
        return file.exists() and file.stat().st_size > 0

    def _show(self, text: str | None) -> None:
        if text:
            self._note(f"warning: {text}")
