"""Charts of metrics over the steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from statistics import fmean

from grpo_mp.monitor.curves import CURVES, SOLVE_RATES, Curve
from grpo_mp.monitor.report.charts import LINES
from grpo_mp.monitor.report.contents import Chart, HeatMap, Series
from grpo_mp.monitor.run_folder import RunRecords

POINTS = 480  # of a line: more than a chart has pixels to tell apart
COLUMNS = 240  # of a map


def charts_of(section: str, runs: Sequence[RunRecords]) -> tuple[Chart, ...]:
    """Make the charts of a section; those of which no run has a value, or only zeros, are left out."""
    charts = []
    for curve in CURVES[section]:
        if curve.stacked:  # of each run its own
            charts += [
                replace(chart_of(curve, [run], place), title=titled(curve.title, run, runs))
                for place, run in enumerate(runs)
            ]
        else:
            charts.append(chart_of(curve, runs))
    return tuple(chart for chart in charts if any(any(series.values) for series in chart.series))


def titled(title: str, run: RunRecords, runs: Sequence[RunRecords]) -> str:
    """Return a title, with the run's name where there are several."""
    return f"{title}, {run.name}" if len(runs) > 1 else title


def chart_of(curve: Curve, runs: Sequence[RunRecords], first: int = 0) -> Chart:
    """Make a chart with a line for each metric of each run; `first`: place of the first run in the report.

    Of one run each line has a colour and a dash of its own, of several each run its colour and each metric its dash.
    """
    labels = _labels(curve, runs)
    series = []
    for place, run in enumerate(runs):
        for one in _lines(curve, run, labels):
            number = labels[one.name]
            more = len(labels) * (place // LINES)  # runs whose colours come again
            color, dash = (place, number + more) if len(runs) > 1 else (number, number)
            name = f"{run.name} {one.name}".strip() if len(runs) > 1 else one.name
            series.append(replace(one, name=name, run=first + place, color=color, dash=dash))
    return Chart(curve.title, curve.unit, tuple(series), curve.note, stacked=curve.stacked)


def _labels(curve: Curve, runs: Sequence[RunRecords]) -> dict[str, int]:
    """Return a number for each label of a chart, the same whatever each run has of them."""
    plain = [label for label in curve.patterns if label]
    found = [label for run in runs for label, _ in _names(curve, run)]
    return {label: number for number, label in enumerate(dict.fromkeys([*plain, *found]))}


def _names(curve: Curve, run: RunRecords) -> list[tuple[str, str]]:
    known = {name: None for line in run.metrics for name in line}
    return [
        (_label(label, pattern, name), name)
        for label, pattern in curve.patterns.items()
        for name in known
        if fnmatchcase(name, pattern)
    ]


def _label(label: str, pattern: str, name: str) -> str:
    """Return what a line is called: its label, and with `*` in the pattern what that stands for."""
    before, star, after = pattern.partition("*")
    if not label:
        return name.rsplit("/", 1)[-1]
    return f"{label} {name.removeprefix(before).removesuffix(after)}" if star else label


def _lines(curve: Curve, run: RunRecords, labels: dict[str, int]) -> Iterator[Series]:
    """Yield the lines of a run, all at the same steps, but where one has no value."""
    names = dict(_names(curve, run))
    rows = [line for line in run.metrics if any(name in line for name in names.values())]
    if curve.stacked:  # what a step lacks took no time
        rows = [{**dict.fromkeys(names.values(), 0.0), **line} for line in rows]
    columns = [[line.get(name, math.nan) for line in rows] for name in names.values()]
    shown = [list(map(sum, zip(*columns, strict=True)))] if curve.stacked else columns
    kept = [rows[index] for index in downsample(shown, POINTS)]
    for label in sorted(names, key=labels.__getitem__):
        points = [line for line in kept if names[label] in line]
        if points:
            yield _series(label, names[label], points, curve)


def _series(label: str, name: str, points: Sequence[Mapping[str, float]], curve: Curve) -> Series:
    steps, values = tuple(line["step"] for line in points), tuple(line[name] * curve.scale for line in points)
    if not curve.band:
        return Series(label, steps, values)
    widths = [line.get(curve.band, 0.0) * curve.scale for line in points]
    pairs = list(zip(values, widths, strict=True))
    return Series(label, steps, values=values, low=tuple(v - w for v, w in pairs), high=tuple(v + w for v, w in pairs))


def downsample(columns: Sequence[Sequence[float]], limit: int) -> list[int]:
    """Return ascending indices, at most `limit` where that allows 8 for each column, of columns of one length.

    Both ends; of even stretches the least and the largest value of each column, and one that is not finite. So a spike
    or a gap of one step stays, however long the run. All, where there are no more.
    """
    length = len(columns[0]) if columns else 0
    if length <= limit:
        return list(range(length))
    kept, stretches = {0, length - 1}, max(2, (limit - 2) // (3 * len(columns)))
    for stretch in range(stretches):
        inside = range(stretch * length // stretches, (stretch + 1) * length // stretches)
        for values in columns:
            finite = [index for index in inside if math.isfinite(values[index])]
            if finite:
                kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            kept |= set([index for index in inside if not math.isfinite(values[index])][:1])
    return sorted(kept)


def solve_rate_maps(runs: Sequence[RunRecords]) -> tuple[HeatMap, ...]:
    """Return for each run how many of all its groups had which share of right answers, step by step."""
    maps = (_solve_rates(run, place, runs) for place, run in enumerate(runs))
    return tuple(one for one in maps if one.x)


def _solve_rates(run: RunRecords, place: int, runs: Sequence[RunRecords]) -> HeatMap:
    lines = [line for line in run.metrics if all(name in line for name in SOLVE_RATES.values())]
    count = min(COLUMNS, len(lines))
    stretches = [lines[i * len(lines) // count : (i + 1) * len(lines) // count] for i in range(count)]
    return HeatMap(
        titled("Groups by solve rate", run, runs),
        "share of groups",
        rows=tuple(SOLVE_RATES),
        x=tuple(stretch[0]["step"] for stretch in stretches),
        shares=tuple(tuple(fmean(line[name] for line in part) for part in stretches) for name in SOLVE_RATES.values()),
        note="How many of a group's answers are right, of all groups: the stronger the colour, the more of them.",
        run=place,
    )
