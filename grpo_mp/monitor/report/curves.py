"""Charts of the report: metrics over the steps, and scores of the eval sets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from grpo_mp.monitor.curves import CURVES, Curve
from grpo_mp.monitor.evaluation import Estimate
from grpo_mp.monitor.report.charts import Chart, Series
from grpo_mp.monitor.run_folder import RunRecords
from grpo_mp.utils.phases import GIB

POINTS = 480  # maximum points of a line: more than a chart can resolve


def charts_of(section: str, run: RunRecords) -> tuple[Chart, ...]:
    """Return the charts of a section, except those without a value or with zeros only."""
    charts = (chart_of(curve, run) for curve in CURVES[section])
    return tuple(chart for chart in charts if any(any(series.values) for series in chart.series))


def chart_of(curve: Curve, run: RunRecords) -> Chart:
    """Return a chart with a line for each metric of the run that matches a pattern of the curve.

    All lines have points at the same steps, except where a metric has no value.
    """
    known = dict.fromkeys(name for line in run.metrics for name in line)
    names = {
        _label(label, pattern, name): name
        for label, pattern in curve.metrics.items()
        for name in known
        if fnmatchcase(name, pattern)
    }
    rows = [line for line in run.metrics if any(name in line for name in names.values())]
    if curve.stacked:  # a phase that a step lacks took no time
        rows = [{**dict.fromkeys(names.values(), 0.0), **line} for line in rows]
    columns = [[line.get(name, math.nan) for line in rows] for name in names.values()]
    shown = [list(map(sum, zip(*columns, strict=True)))] if curve.stacked else columns
    kept = [rows[index] for index in downsample(shown, POINTS)]
    lines = (
        replace(_series(label, name, [line for line in kept if name in line], curve), style=number)
        for number, (label, name) in enumerate(names.items())
    )
    return Chart(curve.title, curve.unit, tuple(lines), curve.note, stacked=curve.stacked)


def _label(label: str, pattern: str, name: str) -> str:
    before, star, after = pattern.partition("*")
    if not star:
        return label or name.rsplit("/", 1)[-1]
    return f"{label} {name.removeprefix(before).removesuffix(after)}".strip()


def _series(label: str, name: str, points: Sequence[Mapping[str, float]], curve: Curve) -> Series:
    scale = 1 / GIB if curve.unit == "GiB" else 1.0
    steps = tuple(line["step"] for line in points)
    values = tuple(line[name] * scale for line in points)
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
    kept = {0, length - 1}
    stretches = max(2, (limit - 2) // (3 * len(columns)))
    for stretch in range(stretches):
        inside = range(stretch * length // stretches, (stretch + 1) * length // stretches)
        for values in columns:
            finite = [index for index in inside if math.isfinite(values[index])]
            if finite:
                kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            kept |= set([index for index in inside if not math.isfinite(values[index])][:1])
    return sorted(kept)


def score_charts(run: RunRecords) -> Iterator[Chart]:
    """Yield two charts for each eval set: accuracy over the steps, and pass@k before and after the run."""
    for name in dict.fromkeys(name for scores in run.scores.values() for name in scores):
        known = {step: scores[name] for step, scores in sorted(run.scores.items()) if name in scores}
        accuracies = {
            step: Estimate(score.accuracy, score.accuracy_error)
            for step, score in known.items()
            if score.accuracy is not None
        }
        if accuracies:
            line = _estimates("accuracy", accuracies)
            yield Chart(f"Accuracy on {name}", "share", (line,), "Band: one standard error.")
        ends = dict(zip(dict.fromkeys((min(known), max(known))), ("before", "after"), strict=False))
        passed = {when: known[step].pass_at for step, when in ends.items() if known[step].pass_at}
        lines = [replace(_estimates(when, passed[when]), style=number) for number, when in enumerate(passed)]
        if lines:
            note = "Share of problems; band: one standard error."
            yield Chart(f"pass@k on {name}", "share", tuple(lines), note, x_label="k")


def _estimates(name: str, estimates: Mapping[int, Estimate]) -> Series:
    values = tuple(one.value for one in estimates.values())
    return _banded(name, tuple(estimates), values, [one.error or 0.0 for one in estimates.values()])
