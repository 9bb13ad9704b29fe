"""What the engines of a run do: a line for each time that one was asked, in `<run>/engines/engine_<number>.jsonl`."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_mp.utils.errors import DISK_ERRORS
from grpo_mp.utils.metric_lines import finite

LOGGER = logging.getLogger(__name__)
FOLDER = "engines"
FILE = re.compile(r"engine_(\d+)\.jsonl")
MOST_LINES = 4096  # of a file; the older ones become fewer with time
KEPT_SHARE = 4  # of them the last quarter stays whole


@dataclass(frozen=True)
class EngineLoad:
    """An engine at one moment. What it did not say is None; all are where it `state` is not "works"."""

    time_s: float  # since the epoch
    state: str  # "works", "silent" (no answer), "starts" (again, after it was lost) or "left" (the job is without it)
    running: int | None = None  # requests
    queued: int | None = None  # requests
    cache_share: float | None = None  # of the KV cache that is in use
    tokens_per_s: float | None = None  # decoded since it was asked before
    decoded: float | None = None  # tokens, since the engine started

    @property
    def works(self) -> bool:
        """Return whether the engine has answered."""
        return self.state == "works"


def load_file(run_folder: Path, engine: int) -> Path:
    """Return the file of an engine."""
    return run_folder / FOLDER / f"engine_{engine}.jsonl"


class EngineLoadFile:
    """Appends to an engine's file, which keeps a bounded number of lines; a run that resumes goes on with it.

    A disk that does not take a line is no reason to end: it is left out.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines = len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0

    def append(self, load: EngineLoad) -> None:
        """Write a line."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if self._lines >= MOST_LINES:
                self._thin()
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(load)) + "\n")
            self._lines += 1
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            LOGGER.info("%s: %s: a line is left out", self._file, error.strerror)

    def _thin(self) -> None:
        kept = thinned(self._file.read_text(encoding="utf-8").splitlines())
        temporary = self._file.with_suffix(".incomplete")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        temporary.replace(self._file)
        self._lines = len(kept)


def thinned(lines: Sequence[str]) -> list[str]:
    """Return every second line, and the whole last quarter: the further back, the fewer lines are left."""
    whole = len(lines) - len(lines) // KEPT_SHARE
    return [*lines[:whole:2], *lines[whole:]]


def read_loads(run_folder: Path) -> dict[int, list[EngineLoad]]:
    """Read the lines of each engine of a run, by its number; what is no line of these is left out."""
    files = {match[1]: file for file in (run_folder / FOLDER).glob("*") if (match := FILE.fullmatch(file.name))}
    return {int(number): [*_loads(file)] for number, file in sorted(files.items(), key=lambda item: int(item[0]))}


def _loads(file: Path) -> Iterable[EngineLoad]:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if (load := parse_load(line)) is not None:
            yield load


def parse_load(line: str | bytes) -> EngineLoad | None:
    """Return what a line says; None where it was torn by a kill, or is of another version."""
    try:
        values = json.loads(line)
        load = EngineLoad(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = [value for name, value in values.items() if name != "state" and value is not None]
    whole = load.time_s is not None and isinstance(load.state, str) and all(finite(one) is not None for one in numbers)
    return load if whole else None


def read_sglang_loads(reply: Any, now_s: float, before: EngineLoad | None) -> EngineLoad:
    """Read what SGLang's /v1/loads answers: the sums over its replicas of attention.

    `before`: the same engine when it was asked before. Raises KeyError, TypeError or ValueError for something else.
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
    """Return the tokens of all decode steps so far, the last of SGLang's decode moments; None where it keeps none.

    The first step after a prefill is not in it: it counts for no cadence.
    """
    moments = [load["decode_moments"] for load in loads if load.get("decode_moments")]
    return sum(float(each[-1]) for each in moments) if moments else None


def _speed(decoded: float | None, now_s: float, before: EngineLoad | None, reported: float) -> float | None:
    """Return tokens per second since `before`; SGLang's own number, 0 without its metrics, where that is larger."""
    if decoded is None:
        return reported
    if before is None or before.decoded is None or before.decoded > decoded or before.time_s >= now_s:
        return reported or None
    return max(reported, (decoded - before.decoded) / (now_s - before.time_s))
