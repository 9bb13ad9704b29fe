"""Render a report as one HTML file that asks for nothing outside of it."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_mp.monitor.report.answers import describe_token, striking_tokens, token_classes
from grpo_mp.monitor.report.charts import draw, legend
from grpo_mp.monitor.report.contents import Chart, HeatMap, Lanes, Picture, Report, Series, Table
from grpo_mp.monitor.report.overview import number as in_words
from grpo_mp.monitor.samples import evenly_spaced

ROWS = 40  # of the table behind a chart
KINDS = ("best", "worst", "longest", "most mismatched token", "same question")  # of answers
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # of what a browser may load or run
T = TypeVar("T")
COLORINGS = ("nothing", "probability", "mismatch", "advantage")  # of tokens


def render(report: Report) -> str:
    """Return the page. All text is escaped: answers are a model's, names and settings a user's."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    pictures = [chart for section in report.sections for chart in section.charts]
    drawn = {id(picture): Markup(draw(picture, str(number))) for number, picture in enumerate(pictures)}
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
        kinds=[(number, kind) for number, kind in enumerate(KINDS) if kind in kinds],
        kind_number=KINDS.index,
        run_sets=run_sets(report),
        runs_class=runs_class if len(report.runs) > 1 else lambda _: "",
        policy=POLICY,
        colorings=COLORINGS,
        has_tokens=any(answer.tokens for section in report.sections for answer in section.answers),
    )


def runs_class(part: Picture | Table) -> str:
    """Return the class of a picture or table by the runs that it is of: of-0-1; "" for a table of all runs."""
    if isinstance(part, Chart):
        runs = {series.run for series in part.series}
    else:
        runs = {*part.runs} if isinstance(part, Table) else {part.run}
    return "-".join(["of", *map(str, sorted(runs))]) if runs else ""


def run_sets(report: Report) -> dict[str, Markup]:
    """Return, by class, the boxes of its runs as a selector of those that are ticked; of one run there are no boxes."""
    parts = [part for section in report.sections for part in (*section.charts, *section.tables)]
    names = sorted({runs_class(part) for part in parts} - {""}) if len(report.runs) > 1 else []
    boxes = {name: [f"#show-run{run}:checked" for run in name.split("-")[1:]] for name in names}
    return {name: Markup(", ".join(each)) for name, each in boxes.items()}


def describe(picture: Picture) -> str:
    """Say in words what a picture shows, for who cannot see it."""
    if isinstance(picture, HeatMap):
        ends = [(name, shares[0], shares[-1]) for name, shares in zip(picture.rows, picture.shares, strict=True)]
        rows = ", ".join(f"{name} from {in_words(first)} to {in_words(last)}" for name, first, last in ends)
        return f"{picture.title}, {picture.unit}, by {picture.x_label}: {rows}"
    if isinstance(picture, Lanes):
        lanes = zip(picture.rows, picture.bars, strict=True)
        rows = ", ".join(f"{name} {in_words(sum(bar.length for bar in bars))} s at work" for name, bars in lanes)
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
    ends = f"{series.name} from {in_words(known[0][1])} to {in_words(known[-1][1])}"
    return f"{ends}, least {in_words(low)} at {low_x:g}, most {in_words(high)} at {high_x:g}{missing}"


def picture_table(picture: Picture) -> Table:
    """Return the numbers of a picture at no more than ROWS places, the last among them."""
    if isinstance(picture, HeatMap):
        shown = _last_among(range(len(picture.x)))
        rows = tuple((f"{picture.x[i]:g}", *(in_words(row[i]) for row in picture.shares)) for i in shown)
        return Table(picture.title, (picture.x_label, *picture.rows), rows)
    if isinstance(picture, Lanes):
        lanes = zip(picture.rows, picture.bars, strict=True)
        rows = tuple(
            (
                name,
                *(in_words(sum(bar.length for bar in bars if bar.kind == kind)) for kind in range(len(picture.kinds))),
            )
            for name, bars in lanes
        )
        return Table(f"{picture.title}, s", ("rank", *picture.kinds), rows)
    lines = [dict(zip(series.x, series.values, strict=True)) for series in picture.series]
    ends = {end(line) for line in lines if line for end in (min, max)}
    steps = ({x for line in lines for x in line}, {x for line in lines if len(line) <= ROWS for x in line})
    places = sorted(ends.union(*(_last_among(sorted(one)) for one in steps)))  # of a line with few points all
    rows = tuple(
        (f"{place:g}", *(in_words(line[place]) if place in line else "" for line in lines)) for place in places
    )
    return Table(picture.title, (picture.x_label, *(series.name for series in picture.series)), rows)


def _last_among(places: Sequence[T]) -> list[T]:
    return evenly_spaced(places[::-1], ROWS)[::-1]
