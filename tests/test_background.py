"""A function in a thread: its end, its error, its limit."""

import threading

import pytest

from grpo_mp.utils.background import BackgroundTask
from grpo_mp.utils.errors import PhaseTimeout


def test_an_error_is_raised_as_itself() -> None:
    error = KeyError("lost")

    def fail() -> None:
        raise error

    task = BackgroundTask(fail, "failing")
    with pytest.raises(KeyError) as caught:
        task.wait(0, "SAVE", 60.0)
    assert caught.value is error


def test_a_limit_names_rank_and_phase() -> None:
    go = threading.Event()

    def work() -> None:
        go.wait(60.0)

    task = BackgroundTask(work, "slow")
    with pytest.raises(PhaseTimeout, match=r"^rank 3: SAVE in the background passed its limit of 0\.05 s$"):
        task.wait(3, "SAVE", 0.05)
    go.set()
    task.wait(3, "SAVE", 60.0)
