"""Draw a chart as SVG, by Matplotlib; the page's style sets the colours, so that it is readable in the dark."""

import io
import re
from typing import TYPE_CHECKING, Any

from grpo_mp.report.contents import Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = 4.4, 2.7
CHARACTERS = 70  # of a legend's line
LINES = 8  # colours, of the page's style
TEXT = "#010203"  # stands for the colour of the page's text
STAND_INS = {f"#0a0b{index:02x}": f"var(--line{index})" for index in range(LINES)} | {TEXT: "currentColor"}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names of runs and rewards may hold a dollar
    "font.size": 9,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(chart: Chart, salt: str) -> str:
    """Return the chart as an <svg> element; `salt`: unique on its page, so that its inner names are."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        (_draw_areas if chart.stacked else _draw_lines)(axes, chart)
        axes.set(xlabel=chart.x_label, ylabel=chart.unit)
        axes.grid(alpha=0.2, color=TEXT)
        if chart.x_label == "k":
            ks = sorted({x for series in chart.series for x in series.x})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, [f"{k:g}" for k in ks])
        if len(chart.series) > 1 or chart.series[0].name not in ("", chart.unit):
            longest = max(len(series.name) for series in chart.series)
            ncols = max(1, min(3, CHARACTERS // (longest + 8)))
            figure.legend(loc="outside lower center", ncols=ncols, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(file.getvalue())


def _draw_lines(axes: "Axes", chart: Chart) -> None:
    for index, series in enumerate(chart.series):
        color, dashes = list(STAND_INS)[index % LINES], ("-", "--", ":")[index // LINES % 3]
        marker = "o" if len(series.x) < 12 else None
        axes.plot(series.x, series.values, dashes, color=color, label=series.name, marker=marker, markersize=3, lw=1.4)
        if series.low:
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.2, lw=0)


def _draw_areas(axes: "Axes", chart: Chart) -> None:
    shown: list[Series] = [series for series in chart.series if any(series.values)]
    colors = [list(STAND_INS)[index % LINES] for index in range(len(shown))]
    rows = [series.values for series in shown]
    axes.stackplot(shown[0].x, rows, labels=[series.name for series in shown], colors=colors, alpha=0.8)


def _inline(svg: str) -> str:
    """Return the element alone: without what names addresses, sizes or ids that another chart has, too."""
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*">', "<g>", element)
    element = re.sub(r'^<svg xmlns:xlink="[^"]*" width="[^"]*" height="[^"]*"', '<svg aria-hidden="true"', element)
    for stand_in, color in STAND_INS.items():
        element = element.replace(stand_in, color)
    return element
