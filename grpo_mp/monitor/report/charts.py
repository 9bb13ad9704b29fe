"""Charts as data, and their drawings as SVG by Matplotlib; the page's style sets the colours, also in the dark."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = 4.4, 2.8  # 317 units wide: on a phone a unit is about a pixel
LINES = 8  # colours, of the page's style
DASHES = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (9, 3), (3, 3))  # lengths of strokes and gaps
TEXT = "#010203"  # stands for the colour of the page's text
STAND_INS = {f"#0a0b{index:02x}": f"var(--line{index})" for index in range(LINES)} | {TEXT: "currentColor"}
COLORS = tuple(STAND_INS)[:LINES]
PRINTED = ("#0b62a8", "#b85c00", "#00795a", "#a3397b", "#6b4fc0", "#8a6d00", "#b3261e", "#4a5a68")  # as page.css
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names of runs and rewards may hold a dollar
    "font.size": 12,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    "axes.spines.top": False,
    "axes.spines.right": False,
}
WITHOUT_DATE: Any = {"Date": None, "Creator": None}


@dataclass(frozen=True)
class Series:
    """A line of values at ascending `x`, with a band from `low` to `high` if given; a gap where not finite."""

    name: str
    x: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    color: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis, or with `stacked` areas on top of each other."""

    title: str
    unit: str
    series: tuple[Series, ...]
    note: str = ""
    x_label: str = "step"
    stacked: bool = False


def draw(chart: Chart, salt: str) -> str:
    """Return a chart as an <svg> element without a legend; `salt` must be unique on the page."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=INCHES, layout="constrained")
        _draw_chart(figure.add_subplot(), chart)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=WITHOUT_DATE)
    return _inline(file.getvalue())


def _draw_chart(axes: "Axes", chart: Chart) -> None:
    (_draw_areas if chart.stacked else _draw_lines)(axes, chart)
    axes.set(xlabel=chart.x_label, ylabel=chart.unit)
    axes.grid(alpha=0.2, color=TEXT)
    axes.locator_params(nbins=5)
    if chart.x_label == "k":
        ks = sorted({x for series in chart.series for x in series.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [f"{k:g}" for k in ks])


def _draw_lines(axes: "Axes", chart: Chart) -> None:
    for series in chart.series:
        color, dashes = COLORS[series.color % LINES], DASHES[series.dash % len(DASHES)]
        marker = "o" if len(series.x) < 12 else None
        (line,) = axes.plot(series.x, series.values, color=color, marker=marker, markersize=3.5, lw=1.6)
        if dashes:
            line.set_dashes(dashes)
        if series.low:
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.2, lw=0)


def _draw_areas(axes: "Axes", chart: Chart) -> None:
    colors = [COLORS[series.color % LINES] for series in chart.series]
    axes.stackplot(chart.series[0].x, [series.values for series in chart.series], colors=colors, alpha=0.8)


def write_charts(charts: Sequence[Chart], file: Path, columns: int = 3) -> None:
    """Write several charts as one SVG file, dark on white, for a page of Markdown.

    Charts that all have the same lines share one legend; otherwise each chart with several lines has its own.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": "charts", "font.size": 9}
    rows, columns = -(-len(charts) // columns), min(columns, len(charts))
    shared = len({tuple(series.name for series in chart.series) for chart in charts}) == 1
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flat
        for axes, chart in zip(places, charts, strict=False):
            _draw_chart(axes, chart)
            axes.set_title(chart.title)
            drawn = zip(axes.collections if chart.stacked else axes.get_lines(), chart.series, strict=True)
            key = {one.name: line for line, one in drawn if not chart.stacked or any(one.values)}
            if shared and axes is figure.axes[0]:
                figure.legend(key.values(), key, loc="outside lower center", ncols=5, frameon=False)
            elif not shared and len(key) > 1:
                below: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.24), "ncols": 3}  # would hide areas
                axes.legend(key.values(), key, frameon=False, fontsize=8, **below)
        for axes in figure.axes[len(charts) :]:
            axes.set_axis_off()
        text = io.StringIO()
        figure.savefig(text, format="svg", facecolor="white", metadata=WITHOUT_DATE)

    svg = text.getvalue().replace(TEXT, "#1c1c1c")
    for stand_in, color in zip(COLORS, PRINTED, strict=True):
        svg = svg.replace(stand_in, color)
    file.write_text(svg, encoding="utf-8")


def legend(chart: Chart) -> tuple[tuple[str, str, str], ...]:
    """Return name, colour and dashes ("area" in a stacked chart) of each line, for the page's legend."""
    if len(chart.series) == 1 and chart.series[0].name in ("", chart.unit):
        return ()
    return tuple(
        (
            series.name,
            f"var(--line{series.color % LINES})",
            "area" if chart.stacked else " ".join(map(str, DASHES[series.dash % len(DASHES)])),
        )
        for series in chart.series
        if not chart.stacked or any(series.values)
    )


def _inline(svg: str) -> str:
    """Return the element without addresses, sizes, and ids that other charts of the page have."""
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*">', "<g>", element)
    element = re.sub(r'^<svg xmlns:xlink="[^"]*" width="[^"]*" height="[^"]*"', '<svg aria-hidden="true"', element)
    for stand_in, color in STAND_INS.items():
        element = element.replace(stand_in, color)
    return element
