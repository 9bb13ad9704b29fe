"""Engines for the time of a test."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess


@contextmanager
def started_engine(spec: EngineSpec, log: Path) -> Iterator[EngineProcess]:
    """Start an engine, and end it after the body; it may not be ready yet."""
    process = EngineProcess(spec, log)
    try:
        process.start()
        yield process
    finally:
        process.stop()


def wait_until(what: Callable[[], object], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)
