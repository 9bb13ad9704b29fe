"""Run a function in a thread beside the loop, and wait for it with a limit."""

import threading
from collections.abc import Callable

from grpo_mp.errors import PhaseTimeout


class BackgroundTask:
    """A function that runs in a thread of its own; what it raises is raised again by `wait`, as itself.

    The thread does not outlive the process: whoever must have the result calls `wait`.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        """Start `function`; `name` is the thread's, for the stacks of a process that hangs."""
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the function has raised so far."""
        if self._error is not None:
            raise self._error

    def wait(self, rank: int, phase: str, limit_s: float | None) -> None:
        """Wait until the function has ended. Raises what it raised; PhaseTimeout after `limit_s` seconds."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise PhaseTimeout(f"rank {rank}: {phase} in the background passed its limit of {limit_s:g} s")
        self.check()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it again
            self._error = error
