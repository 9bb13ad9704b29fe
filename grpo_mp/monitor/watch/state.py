"""What a run does at this moment, read from its folder: it may not have begun, go on, or have ended."""

import json
import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS
from grpo_mp.monitor.appended import AppendedLines, ChangedFiles
from grpo_mp.monitor.live_ranks import has_processes, is_silent
from grpo_mp.monitor.rules import MetricLine, WarningsOfGrowingRun
from grpo_mp.monitor.run_warnings import to_findings
from grpo_mp.monitor.samples import read_sample
from grpo_mp.monitor.timeline import RANK_TRACE, TAIL_BYTES, Event, parse_event
from grpo_mp.rollout.engine_load import FILE as ENGINE_FILE
from grpo_mp.rollout.engine_load import FOLDER as ENGINES
from grpo_mp.rollout.engine_load import EngineLoad, parse_load
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.findings import Finding
from grpo_mp.utils.metric_lines import parse_metrics
from grpo_mp.utils.reading import read_yaml

LAST_LOADS = 400  # of an engine
SAMPLE_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class RankPhase:
    """What a rank is in: the outermost span and those inside it, and since when; "" between spans."""

    rank: int
    name: str
    since_s: float  # of the innermost, since the epoch
    outer_since_s: float  # of the outermost


@dataclass(frozen=True)
class RunState:
    """A run at `time_s`.

    `status`: "not started", "starts", "runs", "ended" (all steps are done), "stopped", or "silent": of processes on
    other hosts, which have written nothing for longer than a phase may take.
    """

    folder: Path
    status: str
    steps: int  # to be done; 0 where unknown
    time_s: float
    metrics: Sequence[MetricLine] = ()
    ranks: Sequence[RankPhase] = ()
    engines: Mapping[int, Sequence[EngineLoad]] = field(default_factory=dict)
    sample_step: int = 0
    samples: Sequence[Mapping[str, Any]] = ()  # of that step
    warnings: Sequence[Finding] = ()

    @property
    def step(self) -> int:
        """Return the last step that is done."""
        return int(self.metrics[-1]["step"] or 0) if self.metrics else 0

    @property
    def goes_on(self) -> bool:
        """Return whether the job's processes are there, or may be on other machines."""
        return self.status in ("starts", "runs")


class MetricFile:
    """Reads metrics.jsonl again and again; only what is new since is read."""

    def __init__(self, file: Path) -> None:
        self._appended = AppendedLines(file)
        self._lines: dict[int, MetricLine] = {}

    def read(self) -> list[MetricLine]:
        """Return the lines by step; of a step that is there twice, the last.

        A line that is being written waits; one that is no line of a step, as a damaged one, is left out.
        """
        appended = self._appended.read()
        if appended.anew:
            self._lines = {}
        for text in appended.lines:
            line = parse_metrics(text)
            if line is not None:
                self._lines[int(line["step"] or 0)] = line
        return [self._lines[step] for step in sorted(self._lines)]


class RankTrace:
    """Follows what a rank is in by its trace: at first by the end of it, then by the events that are appended."""

    def __init__(self, rank: int, file: Path) -> None:
        self._rank, self._appended = rank, AppendedLines(file, TAIL_BYTES)
        self._known: list[Event] = []

    def read(self) -> RankPhase:
        """Return what the rank is in; the last event has no end of its line until the next one comes."""
        appended = self._appended.read()
        new = [event for line in appended.lines if (event := parse_event(line)) is not None]
        self._known = open_events([*([] if appended.anew else self._known), *new])
        last = parse_event(appended.rest)
        return current_phase(self._rank, self._known if last is None else [*self._known, last])


class EngineFile:
    """Reads what an engine did again and again: its last LAST_LOADS lines."""

    def __init__(self, file: Path) -> None:
        self._appended = AppendedLines(file)
        self._loads = deque[EngineLoad](maxlen=LAST_LOADS)

    def read(self) -> tuple[EngineLoad, ...]:
        """Return the lines, the oldest first."""
        appended = self._appended.read()
        if appended.anew:
            self._loads.clear()
        self._loads += (load for line in appended.lines if (load := parse_load(line)) is not None)
        return tuple(self._loads)


class RunReader:
    """Reads a run folder again and again: of its files only what is new."""

    def __init__(self, folder: Path) -> None:
        """Take a folder. Raises UserError for a file; a folder that is not there yet may come."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: give the run.folder of a run")
        self.folder = folder
        self._metrics = MetricFile(folder / METRICS)
        self._changed, self._settings = ChangedFiles(), ChangedFiles()
        self._warnings = WarningsOfGrowingRun()
        self._traces: dict[int, RankTrace] = {}
        self._engines: dict[int, EngineFile] = {}

    def read(self) -> RunState:
        """Return what the run does now."""
        now_s, metrics = time.time(), self._metrics.read()
        steps, status = self._steps(), "not started"
        if (self.folder / SETTINGS).is_file():
            last = int(metrics[-1]["step"] or 0) if metrics else 0
            ended = "ended" if steps and last >= steps else "stopped"
            status = ("runs" if metrics else "starts") if has_processes(self.folder) else ended
            if status != ended and is_silent(self.folder, now_s, self._phase_limit_s()):
                status = "silent"
        step, samples = self._last_samples()
        return RunState(
            folder=self.folder,
            status=status,
            steps=steps,
            time_s=now_s,
            metrics=metrics,
            ranks=self._rank_phases() if status in ("starts", "runs", "silent") else (),
            engines=self._engine_loads(),
            sample_step=step,
            samples=samples,
            warnings=to_findings(self._warnings.find(metrics), int(metrics[-1]["step"] or 0) if metrics else 0),
        )

    def _rank_phases(self) -> list[RankPhase]:
        files = _numbered(self.folder / "trace", RANK_TRACE)
        self._traces = {rank: self._traces.get(rank) or RankTrace(rank, file) for rank, file in files.items()}
        return [trace.read() for trace in self._traces.values()]

    def _engine_loads(self) -> dict[int, tuple[EngineLoad, ...]]:
        files = _numbered(self.folder / ENGINES, ENGINE_FILE)
        self._engines = {number: self._engines.get(number) or EngineFile(file) for number, file in files.items()}
        return {number: engine.read() for number, engine in self._engines.items()}

    def _last_samples(self) -> tuple[int, list[Mapping[str, Any]]]:
        """Return the last step with samples, and these."""
        steps = _numbered(self.folder / "samples", SAMPLE_FILE)
        if not steps:
            return 0, []
        step = max(steps)
        try:
            samples = self._changed.read(steps[step], _samples)
        except FileNotFoundError:  # a run that resumes has just removed it
            return 0, []
        self._changed.forget_others()
        return step, samples

    def _steps(self) -> int:
        steps = self._setting("run", "steps")
        return steps if isinstance(steps, int) else 0

    def _phase_limit_s(self) -> float:
        limit_s = self._setting("monitor", "phase_timeout_s")
        return float(limit_s) if isinstance(limit_s, int | float) else math.inf

    def _setting(self, section: str, name: str) -> Any:
        """Return a setting of the run; None where it has none, or they cannot be read."""
        try:
            return self._settings.read(self.folder / SETTINGS, read_yaml)[section][name]
        except (OSError, UserError, KeyError, TypeError):
            return None


def _numbered(folder: Path, name: re.Pattern[str]) -> dict[int, Path]:
    """Return the files of a folder by the number in their names, ascending."""
    files = {match[1]: file for file in folder.glob("*") if (match := name.fullmatch(file.name))}
    return {int(number): file for number, file in sorted(files.items(), key=lambda item: int(item[0]))}


def _samples(file: Path) -> list[Mapping[str, Any]]:
    lines = [_object(line) for line in file.read_bytes().splitlines()]
    return [read_sample(line) for line in lines if "response" in line]


def open_events(events: Sequence[Event]) -> list[Event]:
    """Return those of the events that say what a rank is in: the spans that are open, and the last that began or ended.

    Pure.
    """
    last = [event for event in events if event["ph"] in "BE"][-1:]
    return [*[{**event, "ph": "E"} for event in last], *_open_spans(events)]


def current_phase(rank: int, events: Sequence[Event]) -> RankPhase:
    """Return the spans that are open after the events. Pure."""
    spans = _open_spans(events)
    last_s = max((event["ts"] for event in events if event["ph"] in "BE"), default=0.0) / 1e6
    name = " > ".join(span["name"] for span in spans)
    since_s, outer_since_s = (spans[i]["ts"] / 1e6 if spans else last_s for i in (-1, 0))
    return RankPhase(rank, name, since_s, outer_since_s)


def _open_spans(events: Sequence[Event]) -> list[Event]:
    """Return the beginnings of the spans that have not ended after the events, the outermost first."""
    spans: list[Event] = []
    for event in events:
        if event["ph"] == "B":
            spans.append(event)
        elif event["ph"] == "E" and spans:  # else it began before the first of these events
            spans.pop()
        if event["ph"] == "M" and event.get("name") == "process_name":
            spans = []  # a run that resumed
    return spans


def _object(text: bytes) -> dict[str, Any]:
    """Return a line's object; an empty one of what is torn, or something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
