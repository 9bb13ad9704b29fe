"""A command beside the run, of the lowest priority while it goes on: it neither delays the run nor fails it."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_mp.utils.processes import with_death_signal

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
