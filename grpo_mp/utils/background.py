"""Background threads for functions and coroutines."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_mp.utils.errors import PhaseTimeout

Value = TypeVar("Value")
CLOSE_LIMIT_S = 5.0


class BackgroundTask:
    """Runs a function in a daemon thread. `wait` and `check` re-raise an exception of the function."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def has_ended(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def wait(self, rank: int, phase: str, limit_s: float | None) -> None:
        """Wait for the function and re-raise its exception. Raises PhaseTimeout after `limit_s` seconds."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise PhaseTimeout(f"rank {rank}: {phase} in the background passed its limit of {limit_s:g} s")
        self.check()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it again
            self._error = error


class EventLoopThread:
    """Runs an asyncio event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Value]) -> Future[Value]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        return self.submit(coroutine).result()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Cancel the running coroutines and stop the thread."""
        if self.is_closed:
            return
        self.submit(self._cancel_all()).result(CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_LIMIT_S)
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
