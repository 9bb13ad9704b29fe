import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from grpo_mp.rewards.base import RewardError, run_with_timeout


class TooLateError(Exception):
    """What the handlers of these tests raise."""


def limited(seconds: float, work: Callable[[], Any]) -> Any:
    """Call `work` with a time limit, as recipes of code and math rewards do."""

    def ring(number: int, frame: Any) -> None:
        raise TooLateError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def endless() -> None:
    while True:
        pass


def test_a_time_limit_by_sigalrm_ends_user_code_in_a_thread() -> None:
    with pytest.raises(RewardError, match=r"raised TooLateError: no end after 0.05 s"):
        run_with_timeout(lambda: limited(0.05, endless), 60.0)


def test_user_code_catches_what_its_handler_raises_and_goes_on() -> None:
    def scores() -> list[float]:
        values = []
        for work in (lambda: 1.0, endless, lambda: 0.5):
            try:
                values.append(limited(0.05 if work is endless else 60.0, work))
            except TooLateError:
                values.append(0.0)
        return values

    assert run_with_timeout(scores, 60.0) == [1.0, 0.0, 0.5]


def test_threads_have_handlers_and_alarms_of_their_own() -> None:
    def state() -> tuple[Any, ...]:
        before = signal.getsignal(signal.SIGALRM)
        first = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(500)
        return before, first, signal.getsignal(signal.SIGALRM), signal.alarm(0)

    expected = (signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN, 500)
    handler, (left, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    assert run_with_timeout(state, 60.0) == expected == run_with_timeout(state, 60.0)
    assert signal.getsignal(signal.SIGALRM) == handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (left > 0)  # a limit of this test run, if it has one


FORKS = """
import os, signal, sys
from grpo_mp.rewards.base import run_with_timeout

def forks():
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(7))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while True:
        signal.pause()

sys.exit(os.waitstatus_to_exitcode(run_with_timeout(forks, 60.0)))
"""


def test_a_forked_child_has_the_signals_of_its_process() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], check=False, timeout=120).returncode == 7
