"""Engines for the time of a test."""

from collections.abc import Iterator
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
