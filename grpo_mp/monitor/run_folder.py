"""Read a run folder, for the report, `grpo-mp watch` and the resume of a run."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS
from grpo_mp.monitor.evaluation import EvalScore, read_scores
from grpo_mp.monitor.samples import STEP_FILE, evenly_spaced
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import check_regular, json_object, read_yaml, refuse_unreadable
from grpo_mp.utils.redact import without_secrets

LOGGER = logging.getLogger(__name__)
SAMPLE_FILES = 40  # sample files to read of a run, evenly spaced, including the last
LARGEST = 1e300  # larger metrics count as not finite, because their sums and differences may overflow
NAMED = 5  # line numbers in a warning about damaged lines
Line = Mapping[str, Any]
MetricLine = Mapping[str, float]  # `step` and the metrics of the step; NaN: not finite


@dataclass(frozen=True)
class RunRecords:
    """Contents of a run folder: settings without secrets, metrics in step order, scores and samples by step."""

    name: str
    settings: Mapping[str, Any]
    metrics: Sequence[MetricLine]
    scores: Mapping[int, Mapping[str, EvalScore]]
    samples: Mapping[int, tuple[Line, ...]]
    eval_samples: Mapping[int, tuple[Line, ...]] = field(default_factory=dict)


def read_run(folder: Path) -> RunRecords:
    """Read one run folder."""
    settings = read_settings(folder)
    metrics = read_metrics(folder / METRICS)
    if not metrics:
        raise UserError(f"{folder}: no step is in {METRICS} yet: wait for the first one, or log with jsonl, too")

    evaluated = files_by_step((folder / "eval").glob("step_*.json"))
    samples, eval_samples = (files_by_step((folder / "samples").glob(f"{kind}_*.jsonl")) for kind in ("step", "eval"))
    with refuse_unreadable(folder):
        return RunRecords(
            folder.resolve().name,
            without_secrets(settings),
            metrics=metrics,
            scores={step: read_scores(file) for step, file in evaluated.items()},
            samples={step: read_samples(samples[step]) for step in _spaced_with_last([*samples])},
            eval_samples={step: read_samples(eval_samples[step]) for step in _spaced_with_last([*eval_samples])},
        )


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings.yaml of a run."""
    file = folder / SETTINGS
    if not file.is_file():
        raise UserError(f"{folder}: no run folder, it has no {SETTINGS}: give the run.folder of a run")
    settings = read_yaml(file)
    if not isinstance(settings, dict):
        raise UserError(f"{file}: no settings of a run: copy it again")
    return settings


def read_metrics(file: Path) -> list[dict[str, float]]:
    """Read metrics.jsonl in step order. The last line of a repeated step counts; damaged lines are skipped."""
    if not file.exists():
        return []
    with refuse_unreadable(file):
        *complete, _ = check_regular(file).read_bytes().split(b"\n")  # the last line may be incomplete
    by_step: dict[int, dict[str, float]] = {}
    damaged = []
    for number, text in enumerate(complete, 1):
        line = parse_metrics(text)
        if line is not None:
            values = {name: math.nan if value is None else value for name, value in line.items()}
            by_step[int(values["step"])] = values
        elif text.strip():
            damaged.append(number)
    if damaged:
        LOGGER.warning("%s: line %s is damaged and left out", file, ", ".join(map(str, damaged[:NAMED])))
    return [by_step[step] for step in sorted(by_step)]


def parse_metrics(content: bytes) -> dict[str, float | None] | None:
    """Return the metrics of a step by name, with None for values that are not finite, or None for an invalid line."""
    line = json_object(content) or {}
    if "step" not in line or not all(isinstance(value, int | float | None) for value in line.values()):
        return None
    return {name: value if value is not None and abs(value) <= LARGEST else None for name, value in line.items()}


def read_samples(file: Path) -> tuple[Line, ...]:
    """Read a JSON Lines file of samples; skip damaged lines."""
    objects = map(json_object, file.read_bytes().splitlines())
    return tuple(line for line in objects if line and "response" in line)


def files_by_step(files: Iterable[Path]) -> dict[int, Path]:
    """Return the files by the step in their names, in ascending order; skip other names."""
    steps = {int(match[1]): file for file in files if (match := STEP_FILE.fullmatch(file.name))}
    return dict(sorted(steps.items()))


def _spaced_with_last(steps: Sequence[int]) -> list[int]:
    return evenly_spaced(steps[::-1], SAMPLE_FILES)[::-1]
