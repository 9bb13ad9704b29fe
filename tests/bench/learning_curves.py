"""Presets on the quickstart task: `python -m tests.bench.learning_curves --presets grpo dapo --seeds 0 1 2 --steps 30`.

Every run starts from its seed's cold start (made where it is missing, as launch/quickstart.sh does) and differs in
`algorithm=PRESET` alone. Four updates a step: with one every ratio is 1, and presets that act on ratios are all alike.
A KL weight of 1e-6, too small to act, loads the reference that the KL is measured against.
Prints a table and writes curves.svg: the mean over seeds of every column. Reach: each learns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PRESETS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_pp")
COLUMNS = {
    "accuracy": "eval/arithmetic/accuracy",
    "reward": "reward/mean",
    "length": "rollout/response_length/mean",
    "wrong length": "rollout/response_length/incorrect",
    "KL": "train/kl_loss",
    "entropy": "train/entropy",
}
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
WIDTH, HEIGHT, MARGIN = 360, 200, 40  # pixels of one panel

Steps = list[dict[str, Any]]
Points = list[tuple[int, float]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("overrides", nargs="*", default=[], help="section.key=value, for every run")
    args = parser.parse_args()
    runs: dict[str, list[Steps]] = {preset: [] for preset in args.presets}
    for seed in args.seeds:
        for preset in args.presets:
            run = args.out / f"{preset}_seed{seed}"
            train(run, preset, seed, args.steps, args.overrides)
            runs[preset].append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    show(runs)
    (args.out / "curves.svg").write_text(picture(runs))


def train(run: Path, preset: str, seed: int, steps: int, overrides: Sequence[str]) -> None:
    """One run; what is there already is not done again."""
    always = ["run.eval_every=10", "run.export=false", "algorithm.kl.coef=1.0e-6", "training.updates_per_step=4"]
    settings = [f"algorithm={preset}", f"run.steps={steps}", *always, *overrides]
    environment = {**os.environ, "SEED": str(seed), "RUN": str(run), "VENV": str(Path(sys.prefix))}
    subprocess.run(["bash", "launch/quickstart.sh", *settings], env=environment, check=True)


def show(runs: dict[str, list[Steps]]) -> None:
    """First and last value of each column, every seed, and the mean of the last."""
    table = Table("preset", *COLUMNS, title="first -> last of each seed; mean of the last")
    for preset, seeds in runs.items():
        table.add_row(preset, *(_cell([points(steps, name) for steps in seeds]) for name in COLUMNS.values()))
    Console(width=170).print(table)


def _cell(curves: list[Points]) -> str:
    known = [curve for curve in curves if curve]
    lines = [f"{curve[0][1]:.3g} -> {curve[-1][1]:.3g}" for curve in known]
    return "\n".join([*lines, f"mean {statistics.fmean(curve[-1][1] for curve in known):.3g}"]) if known else "-"


def points(steps: Steps, name: str) -> Points:
    """(step, value) where a metric was written."""
    return [(step["step"], step[name]) for step in steps if step.get(name) is not None]


def picture(runs: dict[str, list[Steps]]) -> str:
    """One panel for each column, one line for each preset, as SVG."""
    panels = [_panel(place, title, name, runs) for place, (title, name) in enumerate(COLUMNS.items())]
    rows = -(-len(COLUMNS) // 3)
    legend = "".join(
        f'<text x="{MARGIN + 110 * i}" y="14" fill="{color}">{preset}</text>'
        for i, (preset, color) in enumerate(zip(runs, COLORS, strict=False))
    )
    size = f'width="{3 * WIDTH}" height="{rows * HEIGHT + 20}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{legend}{"".join(panels)}</svg>\n'


def _panel(place: int, title: str, name: str, runs: dict[str, list[Steps]]) -> str:
    curves = {preset: _mean([points(steps, name) for steps in seeds]) for preset, seeds in runs.items()}
    values = [value for curve in curves.values() for _, value in curve] or [0.0]
    low, high, last = min(values), max(values), max([step for curve in curves.values() for step, _ in curve] or [1])

    def at(step: int, value: float) -> str:
        x = MARGIN + (WIDTH - 1.5 * MARGIN) * step / last
        y = HEIGHT - MARGIN / 2 - (HEIGHT - 1.5 * MARGIN) * (value - low) / ((high - low) or 1.0)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{color}" points="{" ".join(at(*point) for point in curve)}"/>'
        for curve, color in zip(curves.values(), COLORS, strict=False)
    )
    axis = f'<text x="2" y="{HEIGHT - MARGIN / 2}">{low:.3g}</text><text x="2" y="{MARGIN}">{high:.3g}</text>'
    heading = f'<text x="{WIDTH / 2}" y="{MARGIN / 2 + 8}" text-anchor="middle">{title}</text>'
    move = f"translate({place % 3 * WIDTH},{place // 3 * HEIGHT + 20})"
    return f'<g transform="{move}">{heading}{axis}{lines}</g>'


def _mean(curves: list[Points]) -> Points:
    by_step: dict[int, list[float]] = {}
    for step, value in (point for curve in curves for point in curve):
        by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]


if __name__ == "__main__":
    main()
