"""Ask this rank's engine now and then what it does, in a thread that neither delays nor fails anything."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Self

import httpx

from grpo_mp.rollout.engine_load import EngineLoad, EngineLoadFile, load_file, read_sglang_loads
from grpo_mp.rollout.hosted_engine import HostedEngine
from grpo_mp.utils.background import BackgroundTask

LOGGER = logging.getLogger(__name__)
LIMIT_S = 2.0  # of a request; SGLang answers it from what its scheduler has left in shared memory
END_LIMIT_S = 0.5  # how long the end of a run waits for the thread
Count = Callable[[str, Mapping[str, float]], None]


class EnginePoll:
    """Writes what an engine does into its file, and what has changed as counters of the timeline.

    Use as a context manager. Whatever goes wrong is a line of the rank's log, once.
    """

    def __init__(self, engine: HostedEngine, run_folder: Path, count: Count, every_s: float) -> None:
        """Take an engine, started or not; `count` records counters, see Timeline."""
        self._engine, self._count, self._every_s = engine, count, every_s
        self._file = load_file(run_folder, engine.index)
        self._ended = Event()
        self._last: EngineLoad | None = None
        self._shown: dict[str, Mapping[str, float]] = {}
        self._task: BackgroundTask | None = None

    def __enter__(self) -> Self:
        self._task = BackgroundTask(self._run, f"poll of engine {self._engine.index}")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._task:
            self._task.has_ended(END_LIMIT_S)

    def _run(self) -> None:
        try:
            file = EngineLoadFile(self._file)
            with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:
                while not self._ended.wait(self._every_s):
                    load = self.ask(client)
                    if load:
                        file.append(load)
                        self._show(load)
        except Exception as error:  # noqa: BLE001 - no run ends for want of this
            LOGGER.warning("engine %d is no longer asked what it does: %s", self._engine.index, error)

    def ask(self, client: httpx.Client) -> EngineLoad | None:
        """Return what the engine does now; None before its first start is done."""
        address = self._engine.address
        if address is None:
            state = "starts" if self._engine.is_lost else "left" if self._engine.has_left else None
            return EngineLoad(time.time(), state) if state else None
        url, headers = address
        try:
            reply = client.get(f"{url}/v1/loads", params={"include": "core"}, headers=headers)
            reply.raise_for_status()
            self._last = read_sglang_loads(reply.json(), time.time(), self._last)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):  # busy, lost, or another version
            return EngineLoad(time.time(), "silent")
        return self._last

    def _show(self, load: EngineLoad) -> None:
        """Record what has changed."""
        name = f"engine {self._engine.index}"
        counters: dict[str, Mapping[str, float]] = {
            f"{name} requests": {"running": load.running or 0, "queued": load.queued or 0},
            f"{name} cache use, %": {"cache": round(100 * (load.cache_share or 0.0), 2)},
            f"{name} tokens/s": {"decoded": round(load.tokens_per_s or 0.0, 1)},
        }
        for title, values in counters.items():
            if self._shown.get(title) != values:
                self._count(title, values)
        self._shown |= counters
