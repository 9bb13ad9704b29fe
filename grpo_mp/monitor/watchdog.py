"""Watchdog that enforces the time limits of phases, even on calls that cannot be interrupted."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

STUCK_STATUS = 3  # exit status of a process that its watchdog ended
BEFORE_EXIT_LIMIT_S = 5.0  # time limit of all `before_exit` functions together
GRACE_S = 15.0  # delay after a limit until the C-level timer ends a process whose Python threads cannot run


@dataclass
class Deadline:
    """A phase of a rank with its time limit and its begin (time.monotonic)."""

    rank: int
    phase: str
    limit_s: float
    started_s: float = field(default_factory=time.monotonic)

    def remaining_s(self) -> float:
        return self.started_s + self.limit_s - time.monotonic()

    def message(self) -> str:
        return f"rank {self.rank}: {self.phase} passed its limit of {self.limit_s:g} s"


class Watchdog:
    """Ends the process when a phase exceeds its limit, because no exception can leave a hanging collective.

    First writes the stacks of all threads to `<run>/logs/stuck_rank_<rank>.txt`, then calls the `before_exit` functions
    (stop the engines, flush the writers) for at most `BEFORE_EXIT_LIMIT_S`, then exits with `STUCK_STATUS`. If a call
    holds the GIL, a C-level timer ends the process with status 1, `GRACE_S` after the limit. A process has only one
    such timer, so create at most one watchdog per process. Phases may be nested and may run in several threads.
    """

    def __init__(self, rank: int, run_folder: Path, before_exit: Sequence[Callable[[], None]] = ()) -> None:
        self.rank = rank
        self._stacks = run_folder / "logs" / f"stuck_rank_{rank}.txt"
        self._before_exit = before_exit
        self._deadlines: list[Deadline] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of rank {rank}", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str, limit_s: float) -> Iterator[None]:
        """Watch the `with` body. An exception that leaves the body gets a note with the phase."""
        deadline = Deadline(self.rank, name, limit_s)
        with self._changed:
            self._deadlines.append(deadline)
            self._rearm()
        try:
            yield
        except BaseException as error:
            error.add_note(f"rank {self.rank} in {name}")
            raise
        finally:
            with self._changed:
                self._deadlines = [other for other in self._deadlines if other is not deadline]
                self._rearm()

    def phases(self) -> str:
        """Return the current phases with their durations, such as 'GENERATE for 3 s', the outermost first."""
        now_s = time.monotonic()
        return " > ".join(f"{one.phase} for {now_s - one.started_s:.0f} s" for one in list(self._deadlines))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._deadlines = []
            self._rearm()
        self._thread.join()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rearm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._deadlines:
            _arm_exit_timer(max(0.0, self._next_deadline().remaining_s()) + GRACE_S)
        self._changed.notify()

    def _next_deadline(self) -> Deadline:
        return min(self._deadlines, key=Deadline.remaining_s)

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                remaining_s = self._next_deadline().remaining_s() if self._deadlines else None
                if remaining_s is not None and remaining_s <= 0:
                    self._end_process(self._next_deadline())
                self._changed.wait(remaining_s)

    def _end_process(self, deadline: Deadline) -> None:
        try:
            _arm_exit_timer(GRACE_S)
            line = f"error: {deadline.message()}; the stacks of all threads are in {self._stacks}\n"
            os.write(2, line.encode())  # the hanging thread may hold the lock of sys.stderr
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("w", encoding="utf-8") as file:
                file.write(deadline.message() + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            before_exit_thread = threading.Thread(target=self._run_before_exit, daemon=True)
            before_exit_thread.start()
            before_exit_thread.join(BEFORE_EXIT_LIMIT_S)
        finally:
            os._exit(STUCK_STATUS)

    def _run_before_exit(self) -> None:
        for action in self._before_exit:
            action()
        sys.stdout.flush()
        sys.stderr.flush()


def _arm_exit_timer(after_s: float) -> None:
    faulthandler.dump_traceback_later(after_s, exit=True, file=2)
