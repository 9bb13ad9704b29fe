"""Charts as data, and their drawings as SVG by Matplotlib. The page's CSS sets the colours, also in dark mode."""

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = 4.4, 2.8  # 317 SVG units wide: on a phone one unit is about one pixel
LINES = 8  # number of line colours in the page's CSS
DASHES = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (9, 3), (3, 3))  # lengths of strokes and gaps
TEXT = "#010203"  # placeholder for the text colour of the page
STAND_INS = {f"#0a0b{index:02x}": f"var(--line{index})" for index in range(LINES)} | {TEXT: "currentColor"}
COLORS = tuple(STAND_INS)[:LINES]
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # keep text as text elements
    "text.parse_math": False,  # names of runs and rewards may contain a dollar sign
    "font.size": 12,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Series:
    """A line through `values` at ascending `x`, with an optional band from `low` to `high`; gaps where not finite."""

    name: str
    x: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: int = 0  # number of its colour and dashes


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis; with `stacked`, areas on top of each other."""

    title: str
    unit: str
    series: tuple[Series, ...]
    note: str = ""
    x_label: str = "step"
    stacked: bool = False


def draw(chart: Chart, salt: str) -> str:
    """Return a chart as an <svg> element without a legend. `salt`: text that is unique on the page, for the ids."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=INCHES, layout="constrained")
        draw_chart(figure.add_subplot(), chart)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(file.getvalue())


def draw_chart(axes: "Axes", chart: Chart) -> None:
    """Draw a chart into axes of Matplotlib."""
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
        color = COLORS[series.style % LINES]
        dashes = DASHES[series.style % len(DASHES)]
        marker = "o" if len(series.x) < 12 else None
        (line,) = axes.plot(series.x, series.values, color=color, marker=marker, markersize=3.5, lw=1.6)
        if dashes:
            line.set_dashes(dashes)
        if series.low:
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.2, lw=0)


def _draw_areas(axes: "Axes", chart: Chart) -> None:
    colors = [COLORS[series.style % LINES] for series in chart.series]
    axes.stackplot(chart.series[0].x, [series.values for series in chart.series], colors=colors, alpha=0.8)


def legend(chart: Chart) -> tuple[tuple[str, str, str], ...]:
    """Return (name, colour, dashes) of each line for the page's legend; in a stacked chart dashes is "area"."""
    if len(chart.series) == 1 and chart.series[0].name in ("", chart.unit):
        return ()
    return tuple(
        (
            series.name,
            f"var(--line{series.style % LINES})",
            "area" if chart.stacked else " ".join(map(str, DASHES[series.style % len(DASHES)])),
        )
        for series in chart.series
        if not chart.stacked or any(series.values)
    )


def _inline(svg: str) -> str:
    """Return the <svg> element without metadata, size and group ids, and with the CSS colours of the page."""
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*">', "<g>", element)
    element = re.sub(r'^<svg xmlns:xlink="[^"]*" width="[^"]*" height="[^"]*"', '<svg aria-hidden="true"', element)
    for stand_in, color in STAND_INS.items():
        element = element.replace(stand_in, color)
    return element
