"""What a run folder holds, as far as a report shows it."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mp.errors import UserError
from grpo_mp.evaluation.score import EvalScore, read_scores
from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.monitor.timeline import Span, close_open_spans, read_trace
from grpo_mp.reading import parse_json, read_text, read_yaml
from grpo_mp.redact import without_secrets

SAMPLE_FILES = 40  # that are read of a run: at even distances, the last among them
RANKS = 16  # whose traces are read
STEP_FILE = re.compile(r"(?:step|eval)_(\d+)\.json(?:l)?$")
Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """Records of a run. `settings`: without secrets; `metrics`: a mapping for each step, by name, null as NaN.

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
    if not (folder / "settings.yaml").is_file():
        raise UserError(f"{folder}: no run folder, it has no settings.yaml: give the run.folder of a run")
    settings = read_yaml(folder / "settings.yaml")
    if not isinstance(settings, dict):
        raise UserError(f"{folder / 'settings.yaml'}: no settings of a run: copy it again")
    metrics = read_metric_lines(folder / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder}: no step is in metrics.jsonl yet: wait for the first one, or log with jsonl, too")
    scores = {_step(file): read_scores(file) for file in sorted((folder / "eval").glob("step_*.json"))}
    samples, evals = (_by_step((folder / "samples").glob(f"{kind}_*.jsonl")) for kind in ("step", "eval"))
    return RunRecords(
        name, without_secrets(settings), metrics, scores, samples, evals, _read_plan(folder), _read_traces(folder)
    )


def read_metric_lines(file: Path) -> tuple[Mapping[str, float], ...]:
    """Read metrics.jsonl by step, in order; of a step that is there twice, the last. Raises UserError as `_objects`."""
    if not file.exists():
        return ()
    by_step: dict[int, Mapping[str, float]] = {}
    for number, line in enumerate(_objects(file), 1):
        values = {name: math.nan if value is None else value for name, value in line.items()}
        if line.get("step") is None or any(type(value) not in (int, float) for value in values.values()):
            raise UserError(f"{file}:{number}: no metrics of a step: remove that line")
        by_step[int(values["step"])] = values
    return tuple(by_step[step] for step in sorted(by_step))


def _read_plan(folder: Path) -> Mapping[str, Any]:
    file = folder / "plan.json"
    plan = parse_json(read_text(file), str(file)) if file.exists() else {}
    if not isinstance(plan, dict):
        raise UserError(f"{file}: no plan of a run: remove it")
    return plan


def _read_traces(folder: Path) -> dict[int, tuple[Span, ...]]:
    """Return the spans of at most RANKS ranks, evenly spaced."""
    files = {int(match[1]): file for file in (folder / "trace").glob("rank_*.json") if (match := _rank(file))}
    return {rank: spans_of(read_trace(files[rank])) for rank in evenly_spaced(sorted(files), RANKS)}


def _rank(file: Path) -> re.Match[str] | None:
    return re.fullmatch(r"rank_(\d+)\.json", file.name)


def spans_of(events: Sequence[Line]) -> tuple[Span, ...]:
    """Return the spans of a trace's first lane, in order of their ends; `events` as a Timeline writes them."""
    begun: list[Line] = []
    spans = []
    for event in close_open_spans([dict(event) for event in events if event.get("tid", -1) == 0]):
        if event["ph"] == "B":
            begun.append(event)
        elif event["ph"] == "E" and begun:
            start = begun.pop()
            spans.append(Span(start["name"], round(start["ts"] * 1000), round(event["ts"] * 1000)))
    return tuple(spans)


def _by_step(files: Iterable[Path]) -> dict[int, tuple[Line, ...]]:
    return {_step(file): _objects(file) for file in _last_among(sorted(files))}


def _objects(file: Path) -> tuple[Line, ...]:
    """Read JSON lines but for a last one that a killed process left unfinished. Raises UserError for others."""
    complete, _, _ = read_text(file).rpartition("\n")
    objects = [parse_json(line, f"{file}:{number}") for number, line in enumerate(complete.split("\n"), 1) if line]
    if not all(isinstance(line, dict) for line in objects):
        raise UserError(f"{file}: a line is no JSON object: remove it, or copy the file again")
    return tuple(objects)


def _last_among(files: Sequence[Path]) -> list[Path]:
    return evenly_spaced(files[::-1], SAMPLE_FILES)[::-1]


def _step(file: Path) -> int:
    match = STEP_FILE.fullmatch(file.name)
    if not match:
        raise UserError(f"{file}: no file of a run: remove it")
    return int(match.group(1))
