"""Draw the main curves of a run as one SVG file: `python -m tests.bench.picture RUN --out FILE.svg`."""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from grpo_mp.monitor.report.charts import COLORS, STYLE, TEXT, Chart, draw_chart
from grpo_mp.monitor.report.curves import charts_of, score_charts
from grpo_mp.monitor.run_folder import RunRecords, read_run

# Charts of the picture, beside the scores.
PICTURED = ("Reward", "Response length", "Supervised loss", "Entropy", "Phases of a step")
PRINTED = ("#0b62a8", "#b85c00", "#00795a", "#a3397b", "#6b4fc0", "#8a6d00", "#b3261e", "#4a5a68")  # as page.css


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write_charts(main_charts(read_run(args.run)), args.out)


def main_charts(run: RunRecords) -> tuple[Chart, ...]:
    """Return the most telling charts: scores, reward, length, entropy, phases."""
    charts = [one for key in ("reward", "lengths", "policy", "time") for one in charts_of(key, run)]
    return (*score_charts(run), *(one for one in charts if one.title in PICTURED))


def write_charts(charts: Sequence[Chart], file: Path, columns: int = 3) -> None:
    """Write several charts as one SVG file, dark on white, for a page of Markdown.

    Charts that all have the same lines share one legend; otherwise each chart with several lines has its own.
    """
    style: Any = {**STYLE, "svg.hashsalt": "charts", "font.size": 9}
    rows = -(-len(charts) // columns)
    columns = min(columns, len(charts))
    shared = len({tuple(series.name for series in chart.series) for chart in charts}) == 1
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flat
        for axes, chart in zip(places, charts, strict=False):
            draw_chart(axes, chart)
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
        figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})

    svg = text.getvalue().replace(TEXT, "#1c1c1c")
    for stand_in, color in zip(COLORS, PRINTED, strict=True):
        svg = svg.replace(stand_in, color)
    file.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
