"""What a run folder holds, as far as a report shows it."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from grpo_mp.algorithms.evaluation import EvalScore, read_scores
from grpo_mp.monitor.appended import AppendedLines, ChangedFiles
from grpo_mp.monitor.plan_file import PLAN, read_plan
from grpo_mp.monitor.samples import STEP_FILE, evenly_spaced, read_sample
from grpo_mp.monitor.timeline import Span, parse_event
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.metric_lines import finite
from grpo_mp.utils.reading import check_regular, parse_json, read_text, read_yaml, refuse_unreadable
from grpo_mp.utils.redact import without_secrets

SAMPLE_FILES = 40  # that are read of a run: at even distances, the last among them
RANKS = 16  # whose traces are read
Line = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class RunRecords:
    """Records of a run. `settings`: without secrets; `metrics`: a mapping for each step, by name, null as NaN,
    and so what is beyond LARGEST of monitor/metric_lines.py.

    `scores`: of the eval sets by step; `samples`: lines of samples/, of some steps, by step; `eval_samples`: answers to
    some eval prompts, likewise; `plan`: what was planned for it; `traces`: spans of some ranks, by rank.
    """

    name: str
    settings: Mapping[str, Any]
    metrics: tuple[Mapping[str, float], ...]
    scores: Mapping[int, Mapping[str, EvalScore]]
    samples: Mapping[int, tuple[Line, ...]]
    eval_samples: Mapping[int, tuple[Line, ...]] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    traces: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)


def read_runs(folders: Sequence[Path]) -> tuple[RunRecords, ...]:
    """Read run folders, each under a name of its own. Raises UserError as `read_run`, and for a folder given twice."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a run folder is given twice: give each once")
    names = [folder.resolve().name for folder in folders]
    unique = len({*names}) == len(names)
    return tuple(read_run(folder, name if unique else str(folder)) for folder, name in zip(folders, names, strict=True))


def read_run(folder: Path, name: str) -> RunRecords:
    """Read a run folder. Raises UserError where it is none, has no step yet, or a file of it is damaged."""
    return RunFolder(folder, name).read()


class RunFolder:
    """Reads a run folder again and again as the run goes on: of its files only what is new."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._metrics, self._changed = MetricLines(folder / "metrics.jsonl"), ChangedFiles()
        self._traces: dict[int, TraceSpans] = {}

    def read(self) -> RunRecords:
        """Return what there is now. Raises UserError as `read_run`."""
        folder = self._folder
        if not (folder / "settings.yaml").is_file():
            raise UserError(f"{folder}: no run folder, it has no settings.yaml: give the run.folder of a run")
        settings = self._read(folder / "settings.yaml", read_yaml)
        if not isinstance(settings, dict):
            raise UserError(f"{folder / 'settings.yaml'}: no settings of a run: copy it again")
        metrics = self._metrics.read()
        if not metrics:
            raise UserError(
                f"{folder}: no step is in metrics.jsonl yet: wait for the first one, or log with jsonl, too"
            )
        evaluated = _by_step((folder / "eval").glob("step_*.json"))
        scores = {step: self._read(file, read_scores) for step, file in evaluated.items()}
        samples, evals = (self._samples((folder / "samples").glob(f"{kind}_*.jsonl")) for kind in ("step", "eval"))
        plan = self._read(folder / PLAN, read_plan) if (folder / PLAN).exists() else {}
        self._changed.forget_others()
        return RunRecords(
            self._name, without_secrets(settings), metrics, scores, samples, evals, plan, self._read_traces()
        )

    def _read(self, file: Path, parse: Callable[[Path], T]) -> T:
        with refuse_unreadable(file):
            return self._changed.read(file, parse)

    def _samples(self, files: Iterable[Path]) -> dict[int, tuple[Line, ...]]:
        steps = _by_step(files)
        return {step: self._read(steps[step], _objects) for step in _last_among([*steps])}

    def _read_traces(self) -> dict[int, tuple[Span, ...]]:
        """Return the spans of at most RANKS ranks, evenly spaced."""
        files = {int(match[1]): file for file in (self._folder / "trace").glob("rank_*.json") if (match := _rank(file))}
        shown = evenly_spaced(sorted(files), RANKS)
        self._traces = {rank: self._traces.get(rank) or TraceSpans(files[rank]) for rank in shown}
        return {rank: trace.read() for rank, trace in self._traces.items()}


class MetricLines:
    """Reads metrics.jsonl again and again; only what is new since is read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._forget()

    def _forget(self) -> None:
        self._appended, self._by_step, self._count = AppendedLines(self._file), dict[int, Mapping[str, float]](), 0

    def read(self) -> tuple[Mapping[str, float], ...]:
        """Return the lines by step, in order; of a step that is there twice, the last. None where there is no file.

        Raises UserError for a line that is no step's, each time, until it is removed.
        """
        if not self._file.exists():
            return ()
        check_regular(self._file)
        with refuse_unreadable(self._file):
            appended = self._appended.read()
        if appended.anew:
            self._by_step, self._count = {}, 0
        try:
            for line in appended.lines:
                self._count += 1
                self._add(line, f"{self._file}:{self._count}")
        except UserError:
            self._forget()
            raise
        return tuple(self._by_step[step] for step in sorted(self._by_step))

    def _add(self, text: bytes, place: str) -> None:
        if not text.strip():
            return
        with refuse_unreadable(self._file):
            line = parse_json(text.decode("utf-8-sig"), place)
        if not isinstance(line, dict):
            raise UserError(f"{self._file}: a line is no JSON object: remove it, or copy the file again")
        if finite(line.get("step")) is None or not all(type(one) in (int, float, NoneType) for one in line.values()):
            raise UserError(f"{place}: no metrics of a step: remove that line")
        values = {name: math.nan if finite(value) is None else value for name, value in line.items()}
        self._by_step[int(values["step"])] = values


class TraceSpans:
    """Reads the spans of a trace's first lane again and again; only what is new since is read."""

    def __init__(self, file: Path) -> None:
        self._appended = AppendedLines(file)
        self._spans, self._begun, self._last_us = list[Span](), list[Line](), 0.0

    def read(self) -> tuple[Span, ...]:
        """Return the spans in order of their ends; those that are open end at the last time seen."""
        appended = self._appended.read()
        if appended.anew:
            self._spans, self._begun, self._last_us = [], [], 0.0
        for line in appended.lines:
            if (event := parse_event(line)) is not None:
                self._add(event)
        last = parse_event(appended.rest)  # it has no end of its line until the next one comes
        events = [*self._begun, *([] if last is None else [last])]
        return (*self._spans, *self._unfinished(events))

    def _add(self, event: Line) -> None:
        if event.get("tid", -1) != 0:
            return
        self._last_us = max(self._last_us, event.get("ts", 0.0))
        if event["ph"] == "B":
            self._begun.append(event)
        elif event["ph"] == "E" and self._begun:
            self._spans.append(_span(self._begun.pop(), event["ts"]))

    def _unfinished(self, events: Sequence[Line]) -> Iterator[Span]:
        """Yield the spans of what has begun and of the last event, which is not counted yet."""
        begun, last_us = list[Line](), self._last_us
        for event in events:
            if event.get("tid", -1) == 0:
                last_us = max(last_us, event.get("ts", 0.0))
            if event.get("tid", -1) == 0 and event["ph"] == "B":
                begun.append(event)
            elif event.get("tid", -1) == 0 and event["ph"] == "E" and begun:
                yield _span(begun.pop(), event["ts"])
        yield from (_span(event, last_us) for event in reversed(begun))


def _span(begin: Line, end_us: float) -> Span:
    return Span(begin["name"], round(begin["ts"] * 1000), round(end_us * 1000))


def read_metric_lines(file: Path) -> tuple[Mapping[str, float], ...]:
    """Read metrics.jsonl once, see MetricLines."""
    return MetricLines(file).read()


def _rank(file: Path) -> re.Match[str] | None:
    return re.fullmatch(r"rank_(\d+)\.json", file.name)


def _objects(file: Path) -> tuple[Line, ...]:
    """Read JSON lines but for a last one that a killed process left unfinished. Raises UserError for others."""
    complete, _, _ = read_text(file).rpartition("\n")
    objects = [parse_json(line, f"{file}:{number}") for number, line in enumerate(complete.split("\n"), 1) if line]
    if not all(isinstance(line, dict) for line in objects):
        raise UserError(f"{file}: a line is no JSON object: remove it, or copy the file again")
    return tuple(map(read_sample, objects))


def _last_among(steps: Sequence[int]) -> list[int]:
    return evenly_spaced(steps[::-1], SAMPLE_FILES)[::-1]


def _by_step(files: Iterable[Path]) -> dict[int, Path]:
    """Return the files of a run by step, ascending; others, as a user's copies, are passed over."""
    steps = {int(match[1]): file for file in files if (match := STEP_FILE.fullmatch(file.name))}
    return dict(sorted(steps.items()))
