"""What was run, beside what its preset would set; what evaluations said before and after."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from grpo_mp.algorithms.evaluation import Estimate, EvalScore
from grpo_mp.algorithms.presets import PRESETS, with_preset
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.config import Settings, SftSettings
from grpo_mp.monitor.report.contents import Chart, Series, Table
from grpo_mp.monitor.run_folder import RunRecords
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.section import Section, section_type

# Settings without a default, of which a preset says nothing.
REQUIRED: Mapping[str, Any] = {
    "run": {"folder": "x", "steps": 1},
    "model": {"path": "x"},
    "data": {"train": "x"},
    "rollout": {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 1, "max_response_tokens": 1},
    "reward": {"answer": 1.0},
    "optimizer": {"lr": 1e-6},
}
OWN = "(no default)"
SUPERVISED = "grpo-mp sft"  # in the place of a preset
REQUIRED_SFT: Mapping[str, Any] = {
    "run": {"folder": "x", "steps": 1},
    "model": {"path": "x"},
    "data": {"train": "x"},
    "sft": {"batch_size": 1, "max_tokens": 1},
    "optimizer": {"lr": 1e-6},
}
LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")


def flatten(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting's dotted name and value as text."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)


def preset_settings(preset: str) -> dict[str, str]:
    """Return every setting as the preset and the defaults have it, by dotted name.

    What sections ask of each other is not checked: a preset may need sizes that only a run has.
    """
    if preset != SUPERVISED and preset not in PRESETS:
        raise UserError(f"algorithm.preset: there is no preset {preset!r}: correct it in the run's settings.yaml")
    if preset == SUPERVISED:
        return _defaults(SftSettings, REQUIRED_SFT, REQUIRED_SFT)
    return _defaults(Settings, REQUIRED, with_preset({**REQUIRED, "algorithm": {"preset": preset}}))


def _defaults(settings: type[Section], required: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a tree, section by section, with defaults; those that are `required` have none."""
    given = {name for name, _ in flatten(required)}
    sections: dict[str, Any] = {}
    for name, field in settings.model_fields.items():
        section = section_type(field.annotation)
        value = tree.get(name, field.get_default(call_default_factory=True))
        sections[name] = section.model_validate(tree.get(name, {})).model_dump(mode="json") if section else value
    return {name: OWN if name in given else text for name, text in flatten(sections)}


def settings_tables(runs: Sequence[RunRecords]) -> tuple[Table, ...]:
    """Return what differs from preset and defaults, for each preset that runs have; then every setting of the runs."""
    flat = {run.name: dict(flatten(run.settings)) for run in runs}
    presets: dict[str, list[str]] = {}
    for run in runs:
        presets.setdefault(_preset(run), []).append(run.name)
    tables = []
    for preset, names in presets.items():
        standard = preset_settings(preset)
        known = dict.fromkeys(name for run in names for name in flat[run])
        rows = [(name, standard.get(name, ""), *(flat[run].get(name, "") for run in names)) for name in known]
        changed = tuple(row for row in rows if any(value not in ("", row[1] or "null") for value in row[2:]))
        tables.append(Table(f"Settings that are not those of {preset}", ("setting", preset, *names), changed))
    every = dict.fromkeys(name for settings in flat.values() for name in settings)
    all_rows = tuple((name, *(settings.get(name, "") for settings in flat.values())) for name in every)
    return (*tables, Table("Every setting", ("setting", *flat), all_rows))


def _preset(run: RunRecords) -> str:
    if "sft" in run.settings:
        return SUPERVISED
    return dict(flatten(run.settings)).get("algorithm.preset", AlgorithmConfig().preset)


def summary_table(runs: Sequence[RunRecords]) -> Table:
    """Return a line for each run: preset, steps, reward at both ends, seconds of a step."""
    ends = ("reward, first step", "last step", "s per step")
    columns = ("run", "model", "preset", "schedule", "ranks", "layout", "steps", *ends)
    return Table("Runs", columns, tuple(map(_summary, runs)), tuple(range(len(runs))))


def verdict(run: RunRecords, warnings: int) -> str:
    """Return a sentence on a run: its steps, the number of warnings, and each eval set's accuracy at both ends."""
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


def _summary(run: RunRecords) -> tuple[str, ...]:
    flat = dict(flatten(run.settings))
    rewards, seconds = _finite(run, "reward/mean"), _finite(run, "time/step_s")
    layout = {name: flat[f"layout.{name}"] for name in LAYOUT if flat.get(f"layout.{name}", "1") not in ("1", "null")}
    return (
        run.name,
        *(flat.get(name, "") for name in ("model.path", "algorithm.preset", "schedule")),
        str(run.plan.get("ranks") or len(run.traces) or ""),
        run.plan.get("layout") or ", ".join(f"{name} {size}" for name, size in layout.items()) or "data parallel",
        _steps(run),
        *(number(rewards[end]) if rewards else "" for end in (0, -1)),
        number(fmean(seconds)) if seconds else "",
    )


def _finite(run: RunRecords, name: str) -> list[float]:
    return [line[name] for line in run.metrics if name in line and isfinite(line[name])]


def time_table(runs: Sequence[RunRecords]) -> Table:
    """Return the mean seconds of each phase in a step, and its share of the step, for each run."""
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


def scores_table(runs: Sequence[RunRecords]) -> Table:
    """Return each eval set's numbers at the first and the last evaluation, with standard errors."""
    rows = [(place, row) for place, run in enumerate(runs) if run.scores for row in _score_rows(run)]
    columns = ("run", "set", "measure", "before", "after", "after - before")
    return Table("Before and after", columns, tuple(row for _, row in rows), tuple(place for place, _ in rows))


def _score_rows(run: RunRecords) -> Iterator[tuple[str, ...]]:
    before, after = run.scores[min(run.scores)], run.scores[max(run.scores)]
    for name, score in after.items():
        first = dict(_measures(before[name])) if name in before else {}
        for measure, estimate in _measures(score):
            known = first.get(measure)
            if len(run.scores) == 1:
                yield run.name, name, measure, percent(known), "", ""
                continue
            change = f"{100 * (estimate.value - known.value):+.1f} points" if known else ""
            yield run.name, name, measure, percent(known), percent(estimate), change


def _measures(score: EvalScore) -> Iterator[tuple[str, Estimate]]:
    if score.accuracy is not None:
        yield "accuracy", Estimate(score.accuracy, score.accuracy_error)
    yield from ((f"pass@{k}", estimate) for k, estimate in score.pass_at.items())
    yield from ((f"maj@{k}", estimate) for k, estimate in score.maj_at.items())


def score_charts(runs: Sequence[RunRecords]) -> tuple[Chart, ...]:
    """Return, for each eval set, accuracy over the steps and pass@k before and after."""
    sets = dict.fromkeys(name for run in runs for scores in run.scores.values() for name in scores)
    charts = []
    for name in sets:
        lines = tuple(line for place, run in enumerate(runs) if (line := _accuracy(run, name, place)).x)
        charts.append(Chart(f"Accuracy on {name}", "share", lines, "Band: one standard error."))
        pass_at = tuple(line for place, run in enumerate(runs) for line in _pass_at(run, name, place, len(runs) > 1))
        charts.append(
            Chart(
                f"pass@k on {name}",
                "share",
                series=pass_at,
                note="Share of problems; band: one standard error.",
                x_label="k",
            )
        )
    return tuple(chart for chart in charts if chart.series)


def _accuracy(run: RunRecords, name: str, place: int) -> Series:
    known = {step: scores[name] for step, scores in sorted(run.scores.items()) if name in scores}
    estimates = {step: Estimate(s.accuracy, s.accuracy_error) for step, s in known.items() if s.accuracy is not None}
    return _line(run.name, estimates, place, place, 0)


def _pass_at(run: RunRecords, name: str, place: int, with_run: bool) -> Iterator[Series]:
    ends = dict.fromkeys((min(run.scores), max(run.scores))) if run.scores else {}
    for number, (step, when) in enumerate(zip(ends, ("before", "after"), strict=False)):
        if name in run.scores[step] and run.scores[step][name].pass_at:
            title, color = f"{run.name} {when}" if with_run else when, place if with_run else number
            yield _line(title, run.scores[step][name].pass_at, place, color, 1 - number)


def _line(name: str, estimates: Mapping[int, Estimate], run: int, color: int, dash: int) -> Series:
    values = tuple(one.value for one in estimates.values())
    errors = [one.error or 0.0 for one in estimates.values()]
    low = tuple(value - error for value, error in zip(values, errors, strict=True))
    high = tuple(value + error for value, error in zip(values, errors, strict=True))
    return Series(name, tuple(estimates), values=values, low=low, high=high, run=run, color=color, dash=dash)


def percent(estimate: Estimate | None) -> str:
    """Write a share in percent, with its standard error."""
    if estimate is None:
        return ""
    return f"{estimate.value:.1%}" + ("" if estimate.error is None else f" ± {100 * estimate.error:.1f}")


def number(value: float) -> str:
    """Write a number in four digits."""
    return f"{value:.4g}"
