"""Event loops whose clock is their own: what happens, and in which order, does not depend on the machine."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


class _Jumping(selectors.EpollSelector):
    """Waits for nothing: the clock jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only while something is run, in jumps; threads are none."""

    def __init__(self) -> None:
        self.clock = _Jumping()
        super().__init__(self.clock)
        self.set_default_executor(_Inline())

    def time(self) -> float:
        return self.clock.now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There are no threads to wait for."""


def run_virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


class SkippingLoop(asyncio.SelectorEventLoop):
    """Time passes as it does, and `skip` lets more pass: for limits of what threads and processes do."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def run_with_skips(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that calls `skip`."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(coroutine)


def skip(seconds: float) -> None:
    """Advance the running SkippingLoop by this many seconds at once."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skipped_s += seconds


class _Inline(ThreadPoolExecutor):
    def submit(self, function: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **more))
        except Exception as error:  # noqa: BLE001 - its caller raises it
            done.set_exception(error)
        return done


@dataclass(frozen=True)
class Running:
    """What `Future.result` gives, when the loop has got there."""

    loop: VirtualTimeLoop
    task: "asyncio.Task[Any]"

    def result(self) -> Any:
        return self.loop.run_until_complete(self.task)


@dataclass
class VirtualLoop:
    """As `EventLoopThread`, without a thread: a coroutine runs while somebody waits for a result."""

    loop: VirtualTimeLoop = field(default_factory=VirtualTimeLoop)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Running:
        return Running(self.loop, self.loop.create_task(coroutine))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.submit(coroutine).result()

    def close(self) -> None:
        self.loop.close()
