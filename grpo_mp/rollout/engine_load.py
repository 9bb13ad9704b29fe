"""Load of each engine over time, polled in a thread and appended to `<run>/engines/engine_<number>.jsonl`."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self

import httpx

from grpo_mp.utils.background import BackgroundTask

if TYPE_CHECKING:  # `grpo-mp watch` imports this module and must start fast
    from grpo_mp.rollout.hosted_engine import HostedEngine

LOGGER = logging.getLogger(__name__)
FOLDER = "engines"
FILE = re.compile(r"engine_(\d+)\.jsonl")
MOST_BYTES = 2**20  # a larger file loses its older half
LIMIT_S = 2.0  # time limit of a request; SGLang answers from shared memory, without its scheduler
END_LIMIT_S = 0.5  # how long the end of a run waits for the thread
Count = Callable[[str, Mapping[str, float]], None]


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine at one time. The values after `state` are None unless `state` is "works"."""

    time_s: float  # since the epoch
    state: str  # "works", "silent" (no reply) or "starts" (restarting after a loss)
    running: int | None = None  # number of running requests
    queued: int | None = None  # number of queued requests
    cache_share: float | None = None  # used share of the KV cache
    tokens_per_s: float | None = None  # decoding speed since the last poll
    decoded: float | None = None  # number of tokens decoded since the engine started

    @property
    def works(self) -> bool:
        """Return whether the engine answered the poll."""
        return self.state == "works"


class EnginePoll:
    """Context manager that polls an engine in a thread, appends its load to a file, and adds changes to the timeline.

    A failure of the poll is logged and does not end the run.
    """

    def __init__(self, engine: "HostedEngine", run_folder: Path, count: Count, every_s: float) -> None:
        """Store the engine, which may be started later. `count`: records counters, see Timeline."""
        self._engine = engine
        self._count = count
        self._every_s = every_s
        self._file = load_file(run_folder, engine.index)
        self._ended = Event()
        self._last: EngineLoad | None = None
        self._shown: dict[str, Mapping[str, float]] = {}

    def __enter__(self) -> Self:
        self._task = BackgroundTask(self._run, f"poll of engine {self._engine.index}")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._task.has_ended(END_LIMIT_S)

    def _run(self) -> None:
        try:
            with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:
                while not self._ended.wait(self._every_s):
                    if load := self.ask(client):
                        append_load(self._file, load)
                        self._show(load)
        except Exception as error:  # noqa: BLE001 - a failure of the poll must not end the run
            LOGGER.warning("engine %d is no longer polled: %s", self._engine.index, error)

    def ask(self, client: httpx.Client) -> EngineLoad | None:
        """Return the engine's current load; None until the engine has started for the first time."""
        address = self._engine.address
        if address is None:
            return EngineLoad(time.time(), "starts") if self._engine.is_lost else None
        url, headers = address
        try:
            reply = client.get(f"{url}/v1/loads", params={"include": "core"}, headers=headers)
            reply.raise_for_status()
            self._last = read_sglang_loads(reply.json(), time.time(), self._last)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):  # the engine is busy or lost
            return EngineLoad(time.time(), "silent")
        return self._last

    def _show(self, load: EngineLoad) -> None:
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


def load_file(run_folder: Path, engine: int) -> Path:
    """Return the path of an engine's load file."""
    return run_folder / FOLDER / f"engine_{engine}.jsonl"


def append_load(file: Path, load: EngineLoad) -> None:
    """Append a load to an engine's file; first remove the older half of a file above MOST_BYTES."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.stat().st_size > MOST_BYTES:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[len(lines) // 2 :]), encoding="utf-8")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(load)) + "\n")


def read_loads(run_folder: Path) -> dict[int, list[EngineLoad]]:
    """Return the loads of each engine of a run, by engine number; skip damaged lines."""
    files = {int(match[1]): file for file in (run_folder / FOLDER).glob("*") if (match := FILE.fullmatch(file.name))}
    loads: dict[int, list[EngineLoad]] = {number: [] for number in sorted(files)}
    for number, engine_loads in loads.items():
        for line in files[number].read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError):  # a kill may have cut the line
                engine_loads.append(EngineLoad(**json.loads(line)))
    return loads


def read_sglang_loads(reply: Any, now_s: float, before: EngineLoad | None) -> EngineLoad:
    """Parse the reply of SGLang's /v1/loads; sum over the replicas of attention.

    `before`: previous load of the same engine. Raises KeyError, TypeError or ValueError for an unexpected reply.
    """
    loads: list[Mapping[str, Any]] = reply["loads"]
    used, room = (sum(int(load[name]) for load in loads) for name in ("num_used_tokens", "max_total_num_tokens"))
    decoded = _decoded(loads)
    return EngineLoad(
        time_s=now_s,
        state="works",
        running=sum(int(load["num_running_reqs"]) for load in loads),
        queued=sum(int(load["num_waiting_reqs"]) for load in loads),
        cache_share=used / room if room else 0.0,
        tokens_per_s=_speed(decoded, now_s, before, sum(float(load["gen_throughput"]) for load in loads)),
        decoded=decoded,
    )


def _decoded(loads: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the number of tokens decoded so far, from SGLang's `decode_moments`; None if SGLang does not report it."""
    moments = [load["decode_moments"] for load in loads if load.get("decode_moments")]
    return sum(float(each[-1]) for each in moments) if moments else None


def _speed(decoded: float | None, now_s: float, before: EngineLoad | None, reported: float) -> float | None:
    """Return the decoding speed since `before` [tokens/s], or SGLang's own number `reported` if that is larger.

    `reported` is 0 if SGLang's metrics are off.
    """
    if decoded is None:
        return reported
    if before is None or before.decoded is None or before.decoded > decoded or before.time_s >= now_s:
        return reported or None
    return max(reported, (decoded - before.decoded) / (now_s - before.time_s))
