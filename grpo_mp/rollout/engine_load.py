"""Load of each engine over time: polled in a thread, appended to `<run>/engines/engine_<number>.jsonl`."""

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

if TYPE_CHECKING:  # `grpo-mp watch` reads the files and starts fast
    from grpo_mp.rollout.hosted_engine import HostedEngine

LOGGER = logging.getLogger(__name__)
FOLDER = "engines"
FILE = re.compile(r"engine_(\d+)\.jsonl")
MOST_BYTES = 2**20  # of a file; then its older half is removed
LIMIT_S = 2.0  # of a request; SGLang answers it from what its scheduler has left in shared memory
END_LIMIT_S = 0.5  # how long the end of a run waits for the thread
Count = Callable[[str, Mapping[str, float]], None]


@dataclass(frozen=True)
class EngineLoad:
    """An engine at one moment. Values are None where `state` is not "works"."""

    time_s: float  # since the epoch
    state: str  # "works", "silent" (no answer) or "starts" (again, after it was lost)
    running: int | None = None  # requests
    queued: int | None = None  # requests
    cache_share: float | None = None  # used share of the KV cache
    tokens_per_s: float | None = None  # decoded since the last poll
    decoded: float | None = None  # tokens, since the engine started

    @property
    def works(self) -> bool:
        """Return whether the engine has answered."""
        return self.state == "works"


class EnginePoll:
    """Context manager that polls an engine, records its load in a file and changes as counters of the timeline.

    A failure of the poll is logged and does not end the run.
    """

    def __init__(self, engine: "HostedEngine", run_folder: Path, count: Count, every_s: float) -> None:
        """Store the engine, which need not be started; `count` records counters, see Timeline."""
        self._engine, self._count, self._every_s = engine, count, every_s
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
        except Exception as error:  # noqa: BLE001 - no run ends for want of this
            LOGGER.warning("engine %d is no longer polled: %s", self._engine.index, error)

    def ask(self, client: httpx.Client) -> EngineLoad | None:
        """Return the engine's load now; None before its first start is done."""
        address = self._engine.address
        if address is None:
            return EngineLoad(time.time(), "starts") if self._engine.is_lost else None
        url, headers = address
        try:
            reply = client.get(f"{url}/v1/loads", params={"include": "core"}, headers=headers)
            reply.raise_for_status()
            self._last = read_sglang_loads(reply.json(), time.time(), self._last)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):  # busy or lost
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
    """Return the file of an engine."""
    return run_folder / FOLDER / f"engine_{engine}.jsonl"


def append_load(file: Path, load: EngineLoad) -> None:
    """Append a line to an engine's file, whose size is bounded."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.stat().st_size > MOST_BYTES:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[len(lines) // 2 :]), encoding="utf-8")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(load)) + "\n")


def read_loads(run_folder: Path) -> dict[int, list[EngineLoad]]:
    """Read the loads of each engine of a run, by its number; damaged lines are left out."""
    files = {int(match[1]): file for file in (run_folder / FOLDER).glob("*") if (match := FILE.fullmatch(file.name))}
    loads: dict[int, list[EngineLoad]] = {number: [] for number in sorted(files)}
    for number, engine_loads in loads.items():
        for line in files[number].read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError):  # torn by a kill
                engine_loads.append(EngineLoad(**json.loads(line)))
    return loads


def read_sglang_loads(reply: Any, now_s: float, before: EngineLoad | None) -> EngineLoad:
    """Read what SGLang's /v1/loads answers: the sums over its replicas of attention.

    `before`: the last load of the same engine. Raises KeyError, TypeError or ValueError for something else.
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
    """Return the tokens of all decode steps so far, the last of SGLang's decode moments; None where it keeps none."""
    moments = [load["decode_moments"] for load in loads if load.get("decode_moments")]
    return sum(float(each[-1]) for each in moments) if moments else None


def _speed(decoded: float | None, now_s: float, before: EngineLoad | None, reported: float) -> float | None:
    """Return tokens per second since `before`; SGLang's own number, 0 without its metrics, where that is larger."""
    if decoded is None:
        return reported
    if before is None or before.decoded is None or before.decoded > decoded or before.time_s >= now_s:
        return reported or None
    return max(reported, (decoded - before.decoded) / (now_s - before.time_s))
