"""A time limit for calls into a user's code."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from grpo_mp.user_code import no_exit

Values = list[float | None]  # one per sample; None: the reward does not apply
T = TypeVar("T")


class RewardError(Exception):
    """A reward raised, took too long or returned no reward; `sample` is the index of the sample to show."""

    def __init__(self, reason: str, sample: int = 0) -> None:
        super().__init__(reason)
        self.sample = sample


def run_with_timeout(call: Callable[[], T], limit_s: float) -> T:
    """Return the result of `call`. Raises RewardError if it raises or takes longer than `limit_s` seconds.

    The call runs in a daemon thread: it shares models and clients that the function holds, which a process could
    not. A thread cannot be killed, so one that hangs is left behind; being a daemon it does not keep the program alive.
    """
    future = Future[T]()

    def run() -> None:
        try:
            with no_exit():
                future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    try:
        error = future.exception(limit_s)
    except TimeoutError:
        raise RewardError(f"took longer than reward.timeout_s={limit_s:g} s") from None
    if error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RewardError(f"raised {reason}") from error
    return future.result()
