"""What a run does at this moment, read from its folder: it may not have begun, go on, or have ended."""

import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from grpo_mp.checkpoint.run_state import METRICS, PROCESSES, SETTINGS
from grpo_mp.errors import UserError
from grpo_mp.findings import Finding
from grpo_mp.monitor.engine_load import EngineLoad, read_loads
from grpo_mp.monitor.rank_dump import read_process
from grpo_mp.monitor.rules import MetricLine
from grpo_mp.monitor.run_warnings import run_warnings
from grpo_mp.monitor.timeline import Event, rank_traces
from grpo_mp.reading import read_yaml

LAST_LOADS = 400  # of an engine
CREATION_SLACK_S = 2.0  # a process begins before it writes its file
RANK_FILE = re.compile(r"rank_(\d+)\.json")
SAMPLE_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class RankPhase:
    """What a rank is in: the outermost span and those inside it, and since when; "" between spans."""

    rank: int
    name: str
    since_s: float  # since the epoch


@dataclass(frozen=True)
class RunState:
    """A run at `time_s`. `status`: "not started", "starts", "runs", "ended" (all steps are done) or "stopped"."""

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
    """Reads metrics.jsonl again and again; only what is new since is parsed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset, self._inode = 0, 0
        self._lines: dict[int, MetricLine] = {}

    def read(self) -> list[MetricLine]:
        """Return the lines by step; of a step that is there twice, the last. A line that is being written waits."""
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            self._offset, self._lines = 0, {}
            return []
        if stat.st_ino != self._inode or stat.st_size < self._offset:  # a run that resumed has replaced it
            self._offset, self._inode, self._lines = 0, stat.st_ino, {}
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            complete, newline, _ = stream.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        for text in complete.splitlines():
            line = _object(text)
            if isinstance(line.get("step"), int):
                self._lines[line["step"]] = line
        return [self._lines[step] for step in sorted(self._lines)]


class RunReader:
    """Reads a run folder again and again."""

    def __init__(self, folder: Path) -> None:
        """Take a folder. Raises UserError for a file; a folder that is not there yet may come."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: give the run.folder of a run")
        self.folder = folder
        self._metrics = MetricFile(folder / METRICS)
        self._warnings: tuple[Sequence[MetricLine], Sequence[Finding]] = (), ()

    def read(self) -> RunState:
        """Return what the run does now."""
        now_s, metrics = time.time(), self._metrics.read()
        steps, status = _steps(self.folder), "not started"
        if (self.folder / SETTINGS).is_file():
            last = int(metrics[-1]["step"] or 0) if metrics else 0
            ended = "ended" if steps and last >= steps else "stopped"
            status = ("runs" if metrics else "starts") if _has_processes(self.folder) else ended
        step, samples = last_samples(self.folder)
        if metrics != self._warnings[0]:
            self._warnings = metrics, run_warnings(metrics)
        return RunState(
            folder=self.folder,
            status=status,
            steps=steps,
            time_s=now_s,
            metrics=metrics,
            ranks=rank_phases(self.folder) if status in ("starts", "runs") else (),
            engines={number: loads[-LAST_LOADS:] for number, loads in read_loads(self.folder).items()},
            sample_step=step,
            samples=samples,
            warnings=self._warnings[1],
        )


def rank_phases(folder: Path) -> list[RankPhase]:
    """Return what each rank is in, by the end of its trace."""
    return [current_phase(rank, events) for rank, events in rank_traces(folder).items()]


def current_phase(rank: int, events: Sequence[Event]) -> RankPhase:
    """Return the spans that are open after the events. Pure."""
    spans: list[Event] = []
    for event in events:
        if event["ph"] == "B":
            spans.append(event)
        elif event["ph"] == "E" and spans:  # else it began before the first of these events
            spans.pop()
        if event["ph"] == "M" and event.get("name") == "process_name":
            spans = []  # a run that resumed
    last_s = max((event["ts"] for event in events if event["ph"] in "BE"), default=0.0) / 1e6
    return RankPhase(rank, " > ".join(span["name"] for span in spans), spans[-1]["ts"] / 1e6 if spans else last_s)


def last_samples(folder: Path) -> tuple[int, list[Mapping[str, Any]]]:
    """Return the last step with samples, and these."""
    files = {file: SAMPLE_FILE.fullmatch(file.name) for file in (folder / "samples").glob("step_*")}
    steps = {int(match[1]): file for file, match in files.items() if match}
    if not steps:
        return 0, []
    step = max(steps)
    lines = [_object(line) for line in steps[step].read_bytes().splitlines()]
    return step, [line for line in lines if "response" in line]


def _steps(folder: Path) -> int:
    try:
        steps = read_yaml(folder / SETTINGS)["run"]["steps"]
    except (UserError, KeyError, TypeError):
        return 0
    return steps if isinstance(steps, int) else 0


def _has_processes(folder: Path) -> bool:
    """Return whether a rank of the run is there: on other hosts, as far as its file says."""
    for file in (folder / PROCESSES).glob("rank_*.json"):
        match = RANK_FILE.fullmatch(file.name)
        try:
            process = read_process(folder, int(match[1])) if match else None
            if process and (process.host != socket.gethostname() or _is_alive(process.pid, process.started_s)):
                return True
        except UserError:
            continue  # something else wrote it
    return False


def _is_alive(pid: int, started_s: float) -> bool:
    try:
        return psutil.Process(pid).create_time() < started_s + CREATION_SLACK_S
    except psutil.NoSuchProcess:
        return False


def _object(text: bytes) -> dict[str, Any]:
    """Return a line's object; an empty one of what is torn, or something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
