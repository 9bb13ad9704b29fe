"""Rewards and a curriculum that make a run sick: parts of tests/bench/sicknesses.py."""

import os
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import psutil
import torch


def long(completions: list[str], **_: Any) -> list[float]:
    """Pay for length, whatever the answer says."""
    return [min(1.0, len(text) / 200) for text in completions]


def short(completions: list[str], **_: Any) -> list[float]:
    """Pay for brevity, whatever the answer says."""
    return [1 / (1 + len(text) / 10) for text in completions]


def biased(completions: list[str], **_: Any) -> list[float]:
    return [float("boxed{1" in text) for text in completions]


def failing(completions: list[str], **_: Any) -> list[float]:
    if sum(map(len, completions)) % 4 == 0:
        raise ValueError("a judge did not answer")
    return [0.0] * len(completions)


def slow(samples: Any, step: int) -> dict[int, int]:
    time.sleep(2)
    return {}


def slow_rank(samples: Any, step: int) -> dict[int, int]:
    """Slow down every layer's forward pass on rank 1 from now on; skip no prompt."""
    if os.environ["RANK"] == "1":
        slow_down_forwards()
    return {}


def slow_engine(samples: Any, step: int) -> dict[int, int]:
    """Suspend the engine of rank 1 for nine tenths of the time from now on; skip no prompt."""
    if os.environ["RANK"] == "1":
        hold_up_engine()
    return {}


@cache
def hold_up_engine() -> None:
    """Stop the scheduler of this process's engine for ninety of each hundred milliseconds."""
    below = psutil.Process().children(recursive=True)
    schedulers = [one for one in below if "sglang::scheduler" in " ".join(one.cmdline())]

    def alternate() -> None:
        with suppress(psutil.NoSuchProcess):
            while True:
                for stop, seconds in ((True, 0.09), (False, 0.01)):
                    for one in schedulers:
                        (one.suspend if stop else one.resume)()
                    time.sleep(seconds)

    threading.Thread(target=alternate, daemon=True).start()


@cache
def slow_down_forwards() -> None:
    """Make the modules of this process sleep for twenty milliseconds after each forward pass."""
    torch.nn.modules.module.register_module_forward_hook(lambda *_: time.sleep(0.02))
