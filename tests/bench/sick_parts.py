"""Rewards and a curriculum that make a run sick: parts of tests/bench/sicknesses.py."""

import atexit
import os
import signal
import threading
import time
from functools import cache
from typing import Any

import psutil
import torch

LEAK: list[bytes] = []  # what the leaking reward never gives back


def long(completions: list[str], **_: Any) -> list[float]:
    """Pay for length, whatever the answer says."""
    return [min(1.0, len(text) / 200) for text in completions]


def short(completions: list[str], **_: Any) -> list[float]:
    """Pay for brevity, whatever the answer says."""
    return [1 / (1 + len(text) / 10) for text in completions]


def biased(completions: list[str], **_: Any) -> list[float]:
    """Pay for answers that begin with 1, as a judge may who likes them."""
    return [float("boxed{1" in text) for text in completions]


def leaking(completions: list[str], **_: Any) -> list[float]:
    """Keep two megabytes of each call for ever."""
    LEAK.append(b"x" * 2_000_000)
    return [0.0] * len(completions)


def failing(completions: list[str], **_: Any) -> list[float]:
    """Raise for about every fourth group."""
    if sum(map(len, completions)) % 4 == 0:
        raise ValueError("a judge did not answer")
    return [0.0] * len(completions)


def slow(samples: Any, step: int) -> dict[int, int]:
    """Think for two seconds, and skip no prompt."""
    time.sleep(2)
    return {}


def slow_engine(samples: Any, step: int) -> dict[int, int]:
    """Let rank 1's engine work for a twentieth of the time from now on, and skip no prompt."""
    if os.environ["RANK"] == "1":
        throttle_children()
    return {}


@cache
def throttle_children() -> None:
    """Stop and continue the processes of this process's engines in a thread, until it ends.

    Those that watch over them are left alone: they end a stopped engine, too.
    """
    ends = threading.Event()
    thread = threading.Thread(target=_throttle, args=(psutil.Process(), ends), daemon=True)
    thread.start()
    atexit.register(lambda: (ends.set(), thread.join()))


def _throttle(process: psutil.Process, ends: threading.Event) -> None:
    while not ends.is_set():
        children = [child for watcher in process.children() for child in watcher.children(recursive=True)]
        for sent, seconds in ((signal.SIGSTOP, 0.19), (signal.SIGCONT, 0.01)):
            for child in children:
                try:
                    child.send_signal(sent)
                except psutil.NoSuchProcess:
                    continue
            time.sleep(seconds)


def slow_rank(samples: Any, step: int) -> dict[int, int]:
    """Let every layer's forward of rank 1 take longer from now on, and skip no prompt."""
    if os.environ["RANK"] == "1":
        slow_down_forwards()
    return {}


@cache
def slow_down_forwards() -> None:
    """Let this process's modules sleep for twenty milliseconds after each forward."""
    torch.nn.modules.module.register_module_forward_hook(lambda *_: time.sleep(0.02))
