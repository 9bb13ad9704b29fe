"""SIGALRM for user code in threads: time limits such as math-verify's need it, and Python gives it to the main thread.

Here each thread has an alarm of its own. When it rings, the thread raises what the handler raises, between two Python
operations: as with the signal, a long operation in C ends first. A wait such as time.sleep ends first, too.
"""

import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time
from contextvars import ContextVar
from typing import Any

LOG = logging.getLogger(__name__)
# Id of the process in which this thread or task, and the tasks that it creates, runs user code.
guarded: ContextVar[int | None] = ContextVar("guarded", default=None)
_process: dict[str, Any] = {  # the signals of the process
    name: getattr(signal, name) for name in ("signal", "getsignal", "alarm", "setitimer", "getitimer")
}
_local = threading.local()


class _Alarm:
    def __init__(self) -> None:
        self.handler: Any = signal.SIG_DFL
        self._thread_id = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._rings_at = self._interval = 0.0
        self._raised: BaseException | None = None

    def left(self) -> tuple[float, float]:
        """Return the seconds until the alarm rings, and between later times; 0, 0: no alarm is set."""
        return (max(1e-6, self._rings_at - time.monotonic()), self._interval) if self._timer else (0.0, 0.0)

    def set(self, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        """Ring after `seconds`, or never where they are 0, then in each interval. Returns what was left."""
        try:
            return self._set(seconds, interval)
        except BaseException as error:
            if error is not self._raised:
                raise
            return self._set(seconds, interval)  # the alarm before rang just now: nothing waits for it any more

    def _set(self, seconds: float, interval: float) -> tuple[float, float]:
        with self._lock:
            before = self.left()
            if self._timer:
                self._timer.cancel()
            self._timer = None
            self._raise_in_thread(None)
            if seconds > 0:
                self._start(seconds, interval)
        return before

    def _start(self, seconds: float, interval: float) -> None:
        timer = threading.Timer(seconds, lambda: self._ring(timer))
        timer.daemon = True
        self._timer, self._interval, self._rings_at = timer, interval, time.monotonic() + seconds
        timer.start()

    def _ring(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is not timer:  # it was set anew
                return
            self._timer = None
            if self._interval:
                self._start(self._interval, self._interval)
            if callable(self.handler):
                try:
                    self.handler(signal.SIGALRM, None)
                except BaseException as error:  # noqa: BLE001 - raised in the thread of the alarm
                    self._raise_in_thread(error)

    def _raise_in_thread(self, error: BaseException | None) -> None:
        """Raise an error in the thread of this alarm; None: raise none that is on its way."""
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
    for name, function in (
        ("signal", _set_handler),
        ("getsignal", _get_handler),
        ("alarm", _set_seconds),
        ("setitimer", _set_timer),
        ("getitimer", _get_timer),
    ):
        setattr(signal, name, function)


def is_guarded() -> bool:
    """Return whether user code runs here, and not in a process that it has forked."""
    return guarded.get() == os.getpid()


def _has_own(timer: int = signal.ITIMER_REAL) -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return timer == signal.ITIMER_REAL and not is_main and is_guarded()


def _set_handler(number: int, handler: Any, /) -> Any:
    if not _has_own():
        return _process["signal"](number, handler)
    if number != signal.SIGALRM:
        raise _refuse(number)
    alarm = _alarm()
    before, alarm.handler = alarm.handler, handler
    return before


def _get_handler(number: int, /) -> Any:
    return _alarm().handler if _has_own() and number == signal.SIGALRM else _process["getsignal"](number)


def _set_seconds(seconds: int, /) -> int:
    left: float = _alarm().set(seconds)[0] if _has_own() else _process["alarm"](seconds)
    return math.ceil(left)


def _set_timer(timer: int, seconds: float, interval: float = 0.0, /) -> Any:
    return _alarm().set(seconds, interval) if _has_own(timer) else _process["setitimer"](timer, seconds, interval)


def _get_timer(timer: int, /) -> Any:
    return _alarm().left() if _has_own(timer) else _process["getitimer"](timer)


def _refuse(number: int) -> ValueError:
    """Return the error for a handler of another signal, and log it: many callers catch the error."""
    caller = sys._getframe(2)
    text = (
        f"{caller.f_code.co_filename}:{caller.f_lineno}: {caller.f_code.co_name} sets a handler of "
        f"{signal.Signals(number).name}, but it runs in a thread, which handles no signal but SIGALRM: "
        "leave the handler out, or run this code in a process of its own"
    )
    LOG.warning(text)
    return ValueError(text)
