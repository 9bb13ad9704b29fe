"""Render a report as one HTML file that asks for nothing outside of it."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.report.answers import describe_token, striking_tokens, token_classes
from grpo_mp.report.charts import draw, legend
from grpo_mp.report.contents import HeatMap, Lanes, Picture, Report, Series, Table
from grpo_mp.report.overview import number

ROWS = 40  # of the table behind a chart
KINDS = ("best", "worst", "longest", "most mismatched token", "same question")  # of answers
T = TypeVar("T")
COLORINGS = ("nothing", "probability", "mismatch", "advantage")  # of tokens


def render(report: Report) -> str:
    """Return the page. All text is escaped: answers are a model's, names and settings a user's."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = [chart for section in report.sections for chart in section.charts]
    drawn = {id(chart): Markup(draw(chart, str(index))) for index, chart in enumerate(charts)}
    kinds = {answer.why for section in report.sections for answer in section.answers}
    return environment.get_template("page.html").render(
        report=report,
        draw=lambda chart: drawn[id(chart)],
        legend=legend,
        numbers=picture_table,
        describe=describe,
        token_classes=token_classes,
        describe_token=describe_token,
        striking=striking_tokens,
        kinds=[kind for kind in KINDS if kind in kinds],
        colorings=COLORINGS,
        has_tokens=any(answer.tokens for section in report.sections for answer in section.answers),
    )


def describe(picture: Picture) -> str:
    """Say in words what a picture shows, for who cannot see it."""
    if isinstance(picture, HeatMap):
        ends = [(name, shares[0], shares[-1]) for name, shares in zip(picture.rows, picture.shares, strict=True)]
        rows = ", ".join(f"{name} from {number(first)} to {number(last)}" for name, first, last in ends)
        return f"{picture.title}, {picture.unit}, by {picture.x_label}: {rows}"
    if isinstance(picture, Lanes):
        lanes = zip(picture.rows, picture.bars, strict=True)
        rows = ", ".join(f"{name} {number(sum(bar.length for bar in bars))} s at work" for name, bars in lanes)
        return f"{picture.title}: {rows}"
    lines = ", ".join(map(_describe_line, picture.series))
    return f"{picture.title}, {picture.unit}, by {picture.x_label}: {lines}"


def _describe_line(series: Series) -> str:
    known = [(x, value) for x, value in zip(series.x, series.values, strict=True) if isfinite(value)]
    gaps = len(series.x) - len(known)
    missing = f", {gaps} values not finite" if gaps else ""
    if not known:
        return f"{series.name} never finite"
    (low_x, low), (high_x, high) = (pick(known, key=lambda pair: pair[1]) for pick in (min, max))
    ends = f"{series.name} from {number(known[0][1])} to {number(known[-1][1])}"
    return f"{ends}, least {number(low)} at {low_x:g}, most {number(high)} at {high_x:g}{missing}"


def picture_table(picture: Picture) -> Table:
    """Return the numbers of a picture at no more than ROWS places, the last among them."""
    if isinstance(picture, HeatMap):
        shown = _last_among(range(len(picture.x)))
        rows = tuple((f"{picture.x[i]:g}", *(number(row[i]) for row in picture.shares)) for i in shown)
        return Table(picture.title, (picture.x_label, *picture.rows), rows)
    if isinstance(picture, Lanes):
        lanes = zip(picture.rows, picture.bars, strict=True)
        rows = tuple(
            (name, *(number(sum(bar.length for bar in bars if bar.kind == kind)) for kind in range(len(picture.kinds))))
            for name, bars in lanes
        )
        return Table(f"{picture.title}, s", ("rank", *picture.kinds), rows)
    lines = [dict(zip(series.x, series.values, strict=True)) for series in picture.series]
    # Steps that all lines have, where there are such: runs of their own lengths have others.
    common = set.intersection(*map(set, lines)) if lines else set()
    last = {max(line) for line in lines}
    places = _last_among(sorted(common | last if len(common) > 1 else {x for line in lines for x in line}))
    rows = tuple((f"{place:g}", *(number(line[place]) if place in line else "" for line in lines)) for place in places)
    return Table(picture.title, (picture.x_label, *(series.name for series in picture.series)), rows)


def _last_among(places: Sequence[T]) -> list[T]:
    return evenly_spaced(places[::-1], ROWS)[::-1]
