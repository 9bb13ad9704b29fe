"""A command beside the run, of the lowest priority while it goes on: it neither delays the run nor fails it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_mp.processes import with_death_signal

NICENESS = 19
LIMIT_S = 60.0  # for one that is still running when the run ends
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the run's devices and cores are not its own


class SideProcess:
    """Starts `python -m grpo_mp ARGUMENTS`, one at a time, with its output in a log file of the run."""

    def __init__(self, name: str, log: Path) -> None:
        """Take what it is called in a note, and where its output goes."""
        self._name, self._log = name, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], niceness: int = NICENESS) -> str | None:
        """Start it, unless the last one is still at work; return a note where that one failed or this cannot start."""
        note = self._note()
        if self._process is not None:
            return note
        try:
            with self._log.open("wb") as log:
                command = with_death_signal([sys.executable, "-m", "grpo_mp", *arguments])
                environment = os.environ | HIDDEN
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            if niceness:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        except OSError as error:
            return f"{self._name}: not started: {error.strerror}"
        return note

    def finish(self, limit_s: float = LIMIT_S) -> str | None:
        """Wait for the last one, which is ended after `limit_s`; return a note where it failed."""
        if self._process is None:
            return None
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
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
        return f"{self._name}: exit status {status}, see {self._log}" if status else None
