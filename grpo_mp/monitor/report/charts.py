"""Draw a picture as SVG, by Matplotlib; the page's style sets the colours, so that it is readable in the dark."""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mp.monitor.report.contents import Chart, HeatMap, Lanes, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = 4.4, 2.8  # 317 units wide: on a phone a unit is about a pixel
LINES = 8  # colours, of the page's style
DASHES = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (9, 3), (3, 3))  # lengths of strokes and gaps
TEXT = "#010203"  # stands for the colour of the page's text
STAND_INS = {f"#0a0b{index:02x}": f"var(--line{index})" for index in range(LINES)} | {TEXT: "currentColor"}
COLORS = tuple(STAND_INS)[:LINES]
PRINTED = ("#0b62a8", "#b85c00", "#00795a", "#a3397b", "#6b4fc0", "#8a6d00", "#b3261e", "#4a5a68")  # as page.css
MAP_COLOR = (0.22, 0.53, 0.86)  # on white and on black
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names of runs and rewards may hold a dollar
    "font.size": 12,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(picture: Picture, salt: str) -> str:
    """Return a picture as an <svg> element; `salt`: unique on its page, so that its inner names are.

    What is of the report's run N has the class runN. There is no legend: the page writes it in words (`legend`).
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(style):
        height = 0.6 + 0.22 * len(picture.rows) if isinstance(picture, Lanes) else INCHES[1]
        figure = Figure(figsize=(INCHES[0], max(1.4, height)), layout="constrained")
        axes = figure.add_subplot()
        if isinstance(picture, HeatMap):
            _draw_map(axes, picture)
        elif isinstance(picture, Lanes):
            _draw_lanes(axes, picture)
        else:
            _draw_chart(axes, picture)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
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
        line.set_gid(f"run{series.run}")
        if dashes:
            line.set_dashes(dashes)
        if series.low:
            band = axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.2, lw=0)
            band.set_gid(f"run{series.run}")


def _draw_areas(axes: "Axes", chart: Chart) -> None:
    x, rows = chart.series[0].x, [series.values for series in chart.series]
    colors = [COLORS[series.color % LINES] for series in chart.series]
    for area in axes.stackplot(x, rows, colors=colors, alpha=0.8):
        area.set_gid(f"run{chart.series[0].run}")


def _draw_map(axes: "Axes", picture: HeatMap) -> None:
    # Few shares are large: the square root shows a tenth of the groups, too.
    image = [[(*MAP_COLOR, math.sqrt(min(1.0, max(0.0, share)))) for share in row] for row in picture.shares]
    first, last = picture.x[0], max(picture.x[-1], picture.x[0] + 1)
    extent = (first, last, -0.5, len(picture.rows) - 0.5)
    shown = axes.imshow(image, origin="lower", aspect="auto", interpolation="none", extent=extent)
    shown.set_gid(f"run{picture.run}")
    axes.set_yticks(range(len(picture.rows)), picture.rows)
    axes.set(xlabel=picture.x_label)
    axes.locator_params(axis="x", nbins=5)


def _draw_lanes(axes: "Axes", picture: Lanes) -> None:
    for row, bars in enumerate(picture.bars):
        for bar in bars:
            place = axes.barh(row, bar.length, left=bar.start, height=0.8, color=COLORS[bar.kind % LINES])
            place[0].set_gid(f"run{picture.run}")
    axes.set_yticks(range(len(picture.rows)), picture.rows)
    axes.set(xlabel="s", ylim=(len(picture.rows) - 0.5, -0.5))  # a rank without a span has its row, too


def write_charts(charts: Sequence[Chart], file: Path, columns: int = 3) -> None:
    """Write several charts as one SVG file, dark on white, as it is shown in a page of Markdown.

    Charts that all have the same lines share one key; else each has its own, where it has several lines.
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
                below: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.24), "ncols": 3}  # it would hide areas
                axes.legend(key.values(), key, frameon=False, fontsize=8, **below)
        for axes in figure.axes[len(charts) :]:
            axes.set_axis_off()
        text = io.StringIO()
        figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    svg = text.getvalue().replace(TEXT, "#1c1c1c")
    for stand_in, color in zip(COLORS, PRINTED, strict=True):
        svg = svg.replace(stand_in, color)
    file.write_text(svg, encoding="utf-8")


def legend(picture: Picture) -> tuple[tuple[str, str, str, int], ...]:
    """Return name, colour, dashes and run of each line or kind, as the page's key to the picture shows them."""
    if isinstance(picture, Lanes):
        shown = {bar.kind for bars in picture.bars for bar in bars}
        kinds = ((i, kind) for i, kind in enumerate(picture.kinds) if i in shown)
        return tuple((kind, f"var(--line{i % LINES})", "area", picture.run) for i, kind in kinds)
    if isinstance(picture, HeatMap) or (len(picture.series) == 1 and picture.series[0].name in ("", picture.unit)):
        return ()
    return tuple(
        (
            series.name,
            f"var(--line{series.color % LINES})",
            "area" if picture.stacked else " ".join(map(str, DASHES[series.dash % len(DASHES)])),
            series.run,
        )
        for series in picture.series
        if not picture.stacked or any(series.values)
    )


def _inline(svg: str) -> str:
    """Return the element alone: without what names addresses, sizes or ids that another chart has, too."""
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'<g id="(run\d+)">', r'<g class="\1">', element)
    element = re.sub(r'<g id="[^"]*">', "<g>", element)
    # An image is of one run, too, and has its name as its id.
    element = re.sub(r'(<image [^>]*?)id="[^"]*"', r"\1", element)
    element = re.sub(r'^<svg xmlns:xlink="[^"]*" width="[^"]*" height="[^"]*"', '<svg aria-hidden="true"', element)
    for stand_in, color in STAND_INS.items():
        element = element.replace(stand_in, color)
    return element
