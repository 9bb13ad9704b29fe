"""Charts of the report: metrics over the steps, and scores of the eval sets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from grpo_mp.algorithms.evaluation import Estimate
from grpo_mp.monitor.curves import CURVES, Curve
from grpo_mp.monitor.report.charts import LINES, Chart, Series
from grpo_mp.monitor.run_folder import RunRecords
from grpo_mp.utils.phases import GIB

POINTS = 480  # maximum points of a line: more than a chart can resolve


def charts_of(section: str, runs: Sequence[RunRecords]) -> tuple[Chart, ...]:
    """Return the charts of a section, except those without a value or with zeros only."""
    charts = []
    for curve in CURVES[section]:
        if curve.stacked:  # areas of several runs would hide each other
            charts += [replace(chart_of(curve, [run]), title=titled(curve.title, run, runs)) for run in runs]
        else:
            charts.append(chart_of(curve, runs))
    return tuple(chart for chart in charts if any(any(series.values) for series in chart.series))


def titled(title: str, run: RunRecords, runs: Sequence[RunRecords]) -> str:
    """Return the title; append the run's name if there are several runs."""
    return f"{title}, {run.name}" if len(runs) > 1 else title


def chart_of(curve: Curve, runs: Sequence[RunRecords]) -> Chart:
    """Return a chart with a line for each metric of each run.

    With one run, each line has its own colour and dash pattern; with several, runs differ in colour, metrics in dashes.
    """
    labels = _labels(curve, runs)
    series = []
    for place, run in enumerate(runs):
        for one in _lines(curve, run, labels):
            number = labels[one.name]
            more = len(labels) * (place // LINES)  # other dashes for runs that reuse a colour
            color, dash = (place, number + more) if len(runs) > 1 else (number, number)
            name = f"{run.name} {one.name}".strip() if len(runs) > 1 else one.name
            series.append(replace(one, name=name, color=color, dash=dash))
    return Chart(curve.title, curve.unit, tuple(series), curve.note, stacked=curve.stacked)


def _labels(curve: Curve, runs: Sequence[RunRecords]) -> dict[str, int]:
    """Return the index of each label of a chart, common to all runs."""
    plain = [label for label in curve.metrics if label]
    found = [label for run in runs for label, _ in _names(curve, run)]
    return {label: number for number, label in enumerate(dict.fromkeys([*plain, *found]))}


def _names(curve: Curve, run: RunRecords) -> list[tuple[str, str]]:
    known = {name: None for line in run.metrics for name in line}
    return [
        (_label(label, pattern, name), name)
        for label, pattern in curve.metrics.items()
        for name in known
        if fnmatchcase(name, pattern)
    ]


def _label(label: str, pattern: str, name: str) -> str:
    before, star, after = pattern.partition("*")
    if not star:
        return label or name.rsplit("/", 1)[-1]
    return f"{label} {name.removeprefix(before).removesuffix(after)}".strip()


def _lines(curve: Curve, run: RunRecords, labels: dict[str, int]) -> Iterator[Series]:
    """Yield the lines of a run. All have points at the same steps, except where a metric has no value."""
    names = dict(_names(curve, run))
    rows = [line for line in run.metrics if any(name in line for name in names.values())]
    if curve.stacked:  # a phase that a step lacks took no time
        rows = [{**dict.fromkeys(names.values(), 0.0), **line} for line in rows]
    columns = [[line.get(name, math.nan) for line in rows] for name in names.values()]
    shown = [list(map(sum, zip(*columns, strict=True)))] if curve.stacked else columns
    kept = [rows[index] for index in downsample(shown, POINTS)]
    for label in sorted(names, key=labels.__getitem__):
        points = [line for line in kept if names[label] in line]
        if points:
            yield _series(label, names[label], points, curve)


def _series(label: str, name: str, points: Sequence[Mapping[str, float]], curve: Curve) -> Series:
    scale = 1 / GIB if curve.unit == "GiB" else 1.0
    steps, values = tuple(line["step"] for line in points), tuple(line[name] * scale for line in points)
    if not curve.band:
        return Series(label, steps, values)
    return _banded(label, steps, values, [line.get(curve.band, 0.0) * scale for line in points])


def _banded(name: str, x: tuple[float, ...], values: tuple[float, ...], widths: Sequence[float]) -> Series:
    pairs = list(zip(values, widths, strict=True))
    return Series(name, x, values, low=tuple(v - w for v, w in pairs), high=tuple(v + w for v, w in pairs))


def downsample(columns: Sequence[Sequence[float]], limit: int) -> list[int]:
    """Return at most `limit` ascending indices into columns of equal length. `limit`: at least 8 per column.

    Keeps both ends and, in each of several equal stretches, the minimum, the maximum and the first gap of each column,
    so that a spike of one step stays visible.
    """
    length = len(columns[0]) if columns else 0
    if length <= limit:
        return list(range(length))
    # A stretch keeps up to three indices per column.
    kept, stretches = {0, length - 1}, max(2, (limit - 2) // (3 * len(columns)))
    for stretch in range(stretches):
        inside = range(stretch * length // stretches, (stretch + 1) * length // stretches)
        for values in columns:
            finite = [index for index in inside if math.isfinite(values[index])]
            if finite:
                kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            kept |= set([index for index in inside if not math.isfinite(values[index])][:1])
    return sorted(kept)


def score_charts(runs: Sequence[RunRecords]) -> tuple[Chart, ...]:
    """Return two charts for each eval set: accuracy over the steps, and pass@k before and after the run."""
    sets = dict.fromkeys(name for run in runs for scores in run.scores.values() for name in scores)
    charts = []
    for name in sets:
        accuracies = tuple(_accuracy(run, name, place) for place, run in enumerate(runs))
        lines = tuple(line for line in accuracies if line.x)
        charts.append(Chart(f"Accuracy on {name}", "share", lines, "Band: one standard error."))
        pass_at = tuple(line for place, run in enumerate(runs) for line in _pass_at(run, name, place, len(runs) > 1))
        note = "Share of problems; band: one standard error."
        charts.append(Chart(f"pass@k on {name}", "share", pass_at, note, x_label="k"))
    return tuple(chart for chart in charts if chart.series)


def _accuracy(run: RunRecords, name: str, place: int) -> Series:
    known = {step: scores[name] for step, scores in sorted(run.scores.items()) if name in scores}
    estimates = {step: Estimate(s.accuracy, s.accuracy_error) for step, s in known.items() if s.accuracy is not None}
    return replace(_line(run.name, estimates), color=place)


def _pass_at(run: RunRecords, name: str, place: int, with_run: bool) -> Iterator[Series]:
    ends = dict.fromkeys((min(run.scores), max(run.scores))) if run.scores else {}
    for number, (step, when) in enumerate(zip(ends, ("before", "after"), strict=False)):
        if name in run.scores[step] and run.scores[step][name].pass_at:
            title = f"{run.name} {when}" if with_run else when
            line = _line(title, run.scores[step][name].pass_at)
            yield replace(line, color=place if with_run else number, dash=1 - number)


def _line(name: str, estimates: Mapping[int, Estimate]) -> Series:
    values = tuple(one.value for one in estimates.values())
    return _banded(name, tuple(estimates), values, [one.error or 0.0 for one in estimates.values()])
