"""Emulation of SIGALRM in threads that run user code.

Time limits such as those of math-verify need SIGALRM, which Python delivers to the main thread only. Here each thread
with user code has its own timer. When the timer expires, the exception that the signal handler raises is raised in that
thread between two bytecodes; as with the real signal, a long operation in C finishes first.
"""

import ctypes
import math
import os
import signal
import threading
import time
from contextvars import ContextVar
from typing import Any

# Id of the process in which this context (a thread, or a task and the tasks that it creates) runs user code.
guarded: ContextVar[int | None] = ContextVar("guarded", default=None)
_process: dict[str, Any] = {name: getattr(signal, name) for name in ("signal", "getsignal", "alarm", "setitimer")}
_local = threading.local()


class _Alarm:
    def __init__(self) -> None:
        self.handler: Any = signal.SIG_DFL
        self._thread_id = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._rings_at = 0.0
        self._raised: BaseException | None = None

    def set(self, seconds: float) -> float:
        """Expire once after `seconds`; 0 cancels. Return the seconds that were left on the previous alarm."""
        try:
            return self._set(seconds)
        except BaseException as error:
            if error is not self._raised:
                raise
            return self._set(seconds)  # the previous alarm expired in this call, so its exception is obsolete

    def _set(self, seconds: float) -> float:
        with self._lock:
            left = max(1e-6, self._rings_at - time.monotonic()) if self._timer else 0.0
            if self._timer:
                self._timer.cancel()
            self._timer = None
            self._raise_in_thread(None)
            if seconds > 0:
                self._timer = timer = threading.Timer(seconds, lambda: self._ring(timer))
                self._rings_at = time.monotonic() + seconds
                timer.daemon = True
                timer.start()
        return left

    def _ring(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is not timer:  # the alarm was set again meanwhile
                return
            self._timer = None
            if callable(self.handler):
                try:
                    self.handler(signal.SIGALRM, None)
                except BaseException as error:  # noqa: BLE001 - raised in the thread of the alarm
                    self._raise_in_thread(error)

    def _raise_in_thread(self, error: BaseException | None) -> None:
        raised = None
        self._raised = error or self._raised
        if error is not None:
            # PyThreadState_SetAsyncExc takes a class and instantiates it; this class returns the handler's exception.
            raised = ctypes.py_object(type("Raised", (type(error),), {"__new__": lambda cls: error}))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, raised)


def _alarm() -> _Alarm:
    if not hasattr(_local, "alarm"):
        _local.alarm = _Alarm()
    alarm: _Alarm = _local.alarm
    return alarm


def cancel_alarm() -> None:
    """Cancel the alarm of this thread and remove its handler."""
    if hasattr(_local, "alarm"):
        _local.alarm.set(0)
        del _local.alarm


def install_alarms() -> None:
    """Replace functions of `signal` so that guarded threads get their own alarm; other threads are unaffected."""
    functions = {"signal": _signal, "getsignal": _getsignal, "alarm": _set_seconds, "setitimer": _set_timer}
    for name, function in functions.items():
        setattr(signal, name, function)


def is_guarded() -> bool:
    """Return whether this context runs user code. False in processes that user code forked."""
    return guarded.get() == os.getpid()


def _has_own(number: int = signal.SIGALRM) -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return number == signal.SIGALRM and not is_main and is_guarded()


def _signal(number: int, handler: Any, /) -> Any:
    if not _has_own(number):
        return _process["signal"](number, handler)
    alarm = _alarm()
    before, alarm.handler = alarm.handler, handler
    return before


def _getsignal(number: int, /) -> Any:
    return _alarm().handler if _has_own(number) else _process["getsignal"](number)


def _set_seconds(seconds: int, /) -> int:
    return math.ceil(_alarm().set(seconds)) if _has_own() else _process["alarm"](seconds)


def _set_timer(timer: int, seconds: float, interval: float = 0.0, /) -> Any:
    if timer == signal.ITIMER_REAL and _has_own():
        return _alarm().set(seconds), 0.0  # expires once: the interval is ignored
    return _process["setitimer"](timer, seconds, interval)
