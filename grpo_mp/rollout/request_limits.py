"""Time limits of an engine's requests, which stand still while the engine pauses them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestLimits:
    """The limits that run on one engine; all calls come from one event loop."""

    def __init__(self) -> None:
        self.pauses = 0  # that were begun
        self._going = asyncio.Event()
        self._going.set()
        self._left: dict[asyncio.Timeout, float] = {}  # of the limits that stand still, in seconds
        self._running = set[asyncio.Timeout]()

    @property
    def paused(self) -> bool:
        """Return whether requests are paused now."""
        return not self._going.is_set()

    async def wait_until_going(self) -> None:
        """Wait until requests are not paused."""
        await self._going.wait()

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Cancel the body after so many seconds in which requests were not paused, and raise TimeoutError."""
        async with asyncio.timeout(None) as timeout:
            self._left[timeout] = seconds
            if not self.paused:
                self._start(timeout)
            try:
                yield
            finally:
                self._left.pop(timeout, None)
                self._running.discard(timeout)

    def pause(self) -> None:
        """Let all limits stand still."""
        self._going.clear()
        self.pauses += 1
        now = asyncio.get_running_loop().time()
        for timeout in [timeout for timeout in self._running if not timeout.expired()]:
            self._left[timeout] = (timeout.when() or now) - now
            self._running.discard(timeout)
            timeout.reschedule(None)

    def resume(self) -> None:
        """Let them run on."""
        self._going.set()
        for timeout in list(self._left):
            self._start(timeout)

    def _start(self, timeout: asyncio.Timeout) -> None:
        timeout.reschedule(asyncio.get_running_loop().time() + self._left.pop(timeout))
        self._running.add(timeout)
