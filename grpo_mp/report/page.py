"""Render a report as one HTML file that asks for nothing outside of it."""

from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.report.charts import draw
from grpo_mp.report.contents import Chart, Report, Table
from grpo_mp.report.overview import number

ROWS = 40  # of the table behind a chart


def render(report: Report) -> str:
    """Return the page. All text is escaped: answers are a model's, names and settings a user's."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = [chart for section in report.sections for chart in section.charts]
    drawn = {id(chart): Markup(draw(chart, str(index))) for index, chart in enumerate(charts)}
    return environment.get_template("page.html").render(
        report=report, draw=lambda chart: drawn[id(chart)], numbers=chart_table, describe=describe
    )


def describe(chart: Chart) -> str:
    """Say in words what a chart shows, for who cannot see it."""
    lines = ", ".join(_describe_line(series.name, series.values) for series in chart.series)
    return f"{chart.title}, {chart.unit}, by {chart.x_label}: {lines}"


def _describe_line(name: str, values: tuple[float, ...]) -> str:
    return f"{name} from {number(values[0])} to {number(values[-1])}"


def chart_table(chart: Chart) -> Table:
    """Return the numbers of a chart at no more than ROWS places, the last among them."""
    lines = [dict(zip(series.x, series.values, strict=True)) for series in chart.series]
    places = _last_among(sorted({x for line in lines for x in line}))
    rows = tuple((f"{place:g}", *(number(line[place]) if place in line else "" for line in lines)) for place in places)
    return Table(chart.title, (chart.x_label, *(series.name for series in chart.series)), rows)


def _last_among(places: Iterable[float]) -> list[float]:
    return evenly_spaced(list(places)[::-1], ROWS)[::-1]
