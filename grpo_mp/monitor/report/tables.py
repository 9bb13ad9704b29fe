"""Tables of the report: settings, scores before and after, and time per phase."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from grpo_mp.algorithms.evaluation import Estimate, EvalScore
from grpo_mp.monitor.run_folder import RunRecords

LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")


@dataclass(frozen=True)
class Table:
    """A table of text cells. `folded`: the table opens on a click."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


def flatten(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value of each setting as text."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)


def settings_tables(runs: Sequence[RunRecords]) -> tuple[Table, ...]:
    """Return a table of the settings in which the runs differ, if any do, and a table of all settings."""
    flat = {run.name: dict(flatten(run.settings)) for run in runs}
    names = dict.fromkeys(name for settings in flat.values() for name in settings)
    rows = [(name, *(settings.get(name, "") for settings in flat.values())) for name in names]
    columns = ("setting", *flat)
    differing = tuple(row for row in rows if len({*row[1:]}) > 1)
    every = Table("Every setting", columns, tuple(rows), folded=True)
    return (Table("Settings that differ", columns, differing), every) if differing else (every,)


def summary_table(runs: Sequence[RunRecords]) -> Table:
    """Return a table with a row per run: model, preset, layout, steps, first and last reward, seconds per step."""
    ends = ("reward, first step", "last step", "s per step")
    columns = ("run", "model", "preset", "schedule", "layout", "steps", *ends)
    return Table("Runs", columns, tuple(map(_summary, runs)))


def _summary(run: RunRecords) -> tuple[str, ...]:
    flat = dict(flatten(run.settings))
    rewards, seconds = _finite(run, "reward/mean"), _finite(run, "time/step_s")
    layout = {name: flat[f"layout.{name}"] for name in LAYOUT if flat.get(f"layout.{name}", "1") not in ("1", "null")}
    return (
        run.name,
        *(flat.get(name, "") for name in ("model.path", "algorithm.preset", "schedule")),
        ", ".join(f"{name} {size}" for name, size in layout.items()) or "data parallel",
        _steps(run),
        *(f"{rewards[end]:.4g}" if rewards else "" for end in (0, -1)),
        f"{fmean(seconds):.4g}" if seconds else "",
    )


def verdict(run: RunRecords, warnings: int) -> str:
    """Return a sentence with a run's steps, number of warnings, and first and last accuracy on each eval set."""
    ends = [run.scores[min(run.scores)], run.scores[max(run.scores)]] if run.scores else [{}, {}]
    changes = [
        f"{name} {before[name].accuracy:.1%} → {score.accuracy:.1%}"
        for before, after in [ends]
        for name, score in after.items()
        if name in before and None not in (score.accuracy, before[name].accuracy)
    ]
    found = f"{warnings} warning{'s' * (warnings > 1)}" if warnings else "no warnings"
    return "; ".join([f"{_steps(run)} steps", found, *changes])


def _steps(run: RunRecords) -> str:
    return f"{run.metrics[-1]['step']:g} of {dict(flatten(run.settings)).get('run.steps', '?')}"


def _finite(run: RunRecords, name: str) -> list[float]:
    return [line[name] for line in run.metrics if name in line and isfinite(line[name])]


def scores_table(runs: Sequence[RunRecords]) -> Table:
    """Return a table of each eval set's scores at the first and the last evaluation, with standard errors."""
    columns = ("run", "set", "measure", "before", "after", "after - before")
    return Table("Before and after", columns, tuple(row for run in runs if run.scores for row in _score_rows(run)))


def _score_rows(run: RunRecords) -> Iterator[tuple[str, ...]]:
    before, after = run.scores[min(run.scores)], run.scores[max(run.scores)]
    for name, score in after.items():
        first = dict(_measures(before[name])) if name in before else {}
        for measure, estimate in _measures(score):
            known = first.get(measure)
            if len(run.scores) == 1:
                yield run.name, name, measure, _percent(known), "", ""
                continue
            change = f"{100 * (estimate.value - known.value):+.1f} points" if known else ""
            yield run.name, name, measure, _percent(known), _percent(estimate), change


def _measures(score: EvalScore) -> Iterator[tuple[str, Estimate]]:
    if score.accuracy is not None:
        yield "accuracy", Estimate(score.accuracy, score.accuracy_error)
    yield from ((f"pass@{k}", estimate) for k, estimate in score.pass_at.items())
    yield from ((f"maj@{k}", estimate) for k, estimate in score.maj_at.items())


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate.value:.1%}" + ("" if estimate.error is None else f" ± {100 * estimate.error:.1f}")


def time_table(runs: Sequence[RunRecords]) -> Table:
    """Return a table of each phase's mean seconds per step and share of the step, for each run."""
    names = dict.fromkeys(
        name for run in runs for line in run.metrics for name in line if name.startswith("time/") and name[-2:] == "_s"
    )
    rows = tuple((name[5:-2], *(_seconds(run, name) for run in runs)) for name in names)
    return Table("Seconds of a step, mean", ("phase", *(run.name for run in runs)), rows)


def _seconds(run: RunRecords, name: str) -> str:
    pairs = [(line.get(name, 0.0), line["time/step_s"]) for line in run.metrics if "time/step_s" in line]
    steps = [(part, step) for part, step in pairs if isfinite(part) and isfinite(step)]
    whole = sum(step for _, step in steps)
    return f"{fmean(part for part, _ in steps):.3g} s ({sum(part for part, _ in steps) / whole:.1%})" if whole else ""
