"""SIGALRM for user code in threads: time limits such as math-verify's need it, and Python gives it to the main thread.

Each thread of user code has an alarm of its own. When it rings, the thread raises what the handler raises, between two
Python operations: as with the signal, a long operation in C ends first.
"""

import ctypes
import math
import os
import signal
import threading
import time
from contextvars import ContextVar
from typing import Any

# Id of the process in which this thread or task, and the tasks that it creates, runs user code.
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
        """Ring once after `seconds`, never for 0. Returns the seconds that were left."""
        try:
            return self._set(seconds)
        except BaseException as error:
            if error is not self._raised:
                raise
            return self._set(seconds)  # the former alarm rang just now: nothing waits for it any more

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
            if self._timer is not timer:  # it was set anew
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
            # Python takes a class and calls it, so this one gives the handler's error with its message.
            raised = ctypes.py_object(type("Raised", (type(error),), {"__new__": lambda cls: error}))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, raised)


def _alarm() -> _Alarm:
    if not hasattr(_local, "alarm"):
        _local.alarm = _Alarm()
    alarm: _Alarm = _local.alarm
    return alarm


def cancel_alarm() -> None:
    """Forget the alarm and the handler of this thread."""
    if hasattr(_local, "alarm"):
        _local.alarm.set(0)
        del _local.alarm


def install_alarms() -> None:
    """Give guarded threads an alarm of their own; the rest of the process keeps its signals."""
    functions = {"signal": _signal, "getsignal": _getsignal, "alarm": _set_seconds, "setitimer": _set_timer}
    for name, function in functions.items():
        setattr(signal, name, function)


def is_guarded() -> bool:
    """Return whether user code runs here, and not in a process that it has forked."""
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
        return _alarm().set(seconds), 0.0  # rings once, whatever the interval
    return _process["setitimer"](timer, seconds, interval)
