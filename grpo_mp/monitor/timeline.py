"""Timeline of a rank: named spans, written as a Chrome trace during the run, and the time of a step by phase.

During the run the file is a JSON array of events without the closing bracket. chrome://tracing and Perfetto read such
files, so the trace of a killed run is readable. pid is the rank; tid 0 is its only lane, "policy".
"""

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.monitor.metrics import metric_name
from grpo_mp.utils.errors import DISK_ERRORS
from grpo_mp.utils.files import incomplete, write_atomically
from grpo_mp.utils.phases import WAIT, Phase

LOGGER = logging.getLogger(__name__)
Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A named span of one rank, in nanoseconds since the epoch."""

    name: str
    start_ns: int
    end_ns: int


class Timeline:
    """Writes nested spans of one rank to `<run>/trace/rank_<rank>.json`."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        path = trace_path(run_folder, rank)
        earlier = close_open_spans(read_trace(path)) if path.exists() else []
        self._rank = rank
        self._spans: list[Span] = []
        # Durations come from the monotonic clock; the epoch clock only aligns the ranks.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        process = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        lane = {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "policy"}}
        write_atomically(path, "[\n" + _join_events([*earlier, process, lane]))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def now_ns(self) -> int:
        """Return nanoseconds since the epoch; the values never decrease within this process."""
        return self._offset_ns + time.perf_counter_ns()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the `with` body as a span. The begin event is on disk before the body runs."""
        start_ns = self.now_ns()
        self._record("B", name, start_ns)
        try:
            yield
        finally:
            end_ns = self.now_ns()
            self._record("E", name, end_ns)
            self._spans.append(Span(name, start_ns, end_ns))

    def take(self) -> tuple[Span, ...]:
        """Return the spans that have ended since the last call."""
        spans = tuple(self._spans)
        self._spans = []
        return spans

    def close(self) -> None:
        """End the file as valid JSON."""
        if not self._file.closed:
            self._write("\n]\n")
            with suppress(OSError):  # the disk is full
                self._file.close()

    def _record(self, event_type: str, name: str, time_ns: int) -> None:
        event = {"ph": event_type, "name": name, "pid": self._rank, "tid": 0, "ts": time_ns / 1000}
        if not self._file.closed:
            self._write(",\n" + json.dumps(event))

    def _write(self, text: str) -> None:
        """Append text to the file; on a full disk the event is lost."""
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            LOGGER.info("%s: %s: an event is lost", self._path, error.strerror)


def trace_path(run_folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace file."""
    return run_folder / "trace" / f"rank_{rank}.json"


def _join_events(events: list[Event]) -> str:
    return ",\n".join(json.dumps(event) for event in events)


def read_trace(path: Path) -> list[Event]:
    """Read the events of a trace file, complete or not; skip damaged lines."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError, RecursionError):
            event = json.loads(line.rstrip(","))
            kind = event.get("ph") if isinstance(event, dict) else None
            if kind == "M" or (kind in ("B", "E") and "ts" in event):
                events.append(event)
    return events


def close_open_spans(events: list[Event]) -> list[Event]:
    """Return the events and, for each span that a killed process left open, an end event at the last known time."""
    spans: list[Event] = []
    for event in events:
        if event["ph"] == "B":
            spans.append(event)
        elif event["ph"] == "E" and spans:  # else the begin event is damaged
            spans.pop()
    last_ts = max((event["ts"] for event in events if "ts" in event), default=0)
    return [*events, *({**span, "ph": "E", "ts": last_ts} for span in reversed(spans))]


def merge_traces(run_folder: Path) -> Path:
    """Merge the traces of all ranks into the JSON array `<run>/trace.json`; return its path.

    The run may continue meanwhile. Memory holds the events of one rank at a time.
    """
    merged = run_folder / "trace.json"
    with incomplete(merged) as temporary, temporary.open("w", encoding="utf-8") as stream:
        before = "[\n"
        for path in sorted((run_folder / "trace").glob("rank_*.json")):
            if events := close_open_spans(read_trace(path)):
                stream.write(before + _join_events(events))
                before = ",\n"
        stream.write("[\n]\n" if before == "[\n" else "\n]\n")
        stream.flush()
        os.fsync(stream.fileno())
    return merged


@dataclass(frozen=True)
class StepSummary:
    """Time of one step. `seconds`: by span name; overlapping or nested spans of the same name count once."""

    wall_s: float
    seconds: dict[str, float]
    idle_share: float  # share of the wall time inside WAIT spans
    overhead_share: float  # share of the wall time outside the phases that count as work


def summarize(spans: Iterable[Span], start_ns: int, end_ns: int) -> StepSummary:
    """Sum up the spans of a step, which lasts from `start_ns` to `end_ns` on this rank; clip spans to the step."""
    work = {phase.value for phase in Phase if phase.is_work}
    inside = [span for span in spans if span.end_ns > start_ns and span.start_ns < end_ns]
    intervals = [(span.name, max(span.start_ns, start_ns), min(span.end_ns, end_ns)) for span in inside]
    names = sorted({name for name, _, _ in intervals})
    wall_ns = end_ns - start_ns
    seconds = {
        name: covered_ns((start, end) for span_name, start, end in intervals if span_name == name) / 1e9
        for name in names
    }
    work_ns = covered_ns((start, end) for name, start, end in intervals if name in work)
    return StepSummary(
        wall_s=wall_ns / 1e9,
        seconds=seconds,
        idle_share=seconds.get(WAIT, 0.0) * 1e9 / wall_ns if wall_ns else 0.0,
        overhead_share=(wall_ns - work_ns) / wall_ns if wall_ns else 0.0,
    )


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of (start, end) intervals."""
    total = 0
    reached = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def reduce_over_ranks(summaries: Sequence[StepSummary]) -> StepSummary:
    """Combine the summaries of all ranks: the maximum of the seconds, the mean of the shares."""
    names = sorted({name for summary in summaries for name in summary.seconds})
    return StepSummary(
        wall_s=max(summary.wall_s for summary in summaries),
        seconds={name: max(summary.seconds.get(name, 0.0) for summary in summaries) for name in names},
        idle_share=sum(summary.idle_share for summary in summaries) / len(summaries),
        overhead_share=sum(summary.overhead_share for summary in summaries) / len(summaries),
    )


def step_scalars(summary: StepSummary) -> dict[str, float]:
    """Return a summary as metrics: time/step_s, time/generate_s, ..., time/idle_share, time/overhead_share."""
    phase_seconds = {
        metric_name("time/{phase}_s", phase=name.lower()): seconds for name, seconds in summary.seconds.items()
    }
    shares = {"time/idle_share": summary.idle_share, "time/overhead_share": summary.overhead_share}
    return {"time/step_s": summary.wall_s, **phase_seconds, **shares}
