"""Schedules on the quickstart task: `python -m tests.bench.learning_by_schedule [--cells async_4/0 ...] [--steps 40]`.

A cell is a schedule and a seed, of the seed's own cold start (made where it is missing, as launch/quickstart.sh does).
All train on the same number of samples, by the settings of configs/tiny_moe.yaml; with one_step_off and async one rank
trains and one has the engine. A cell's held-out accuracies are appended to OUT/cells.jsonl when it ends, and a cell
that stands there is not run again: the bench can be broken off, and run in parts. Prints a table of what stands there.

Reach: up to staleness 1 the band of the last accuracy (mean, twice its standard error over seeds) overlaps colocated's;
else the exit status is 1.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.quickstart_run import train

CORRECTED = "algorithm.rollout_correction={kind: truncate, high: 2.0}"
DIVIDED = ["engine.ranks=1", "layout={}"]
SCHEDULES = {
    "colocated": ["schedule=colocated"],
    "partial": ["schedule=colocated", "rollout.max_staleness=1"],
    "partial_2": ["schedule=colocated", "rollout.max_staleness=2"],
    "partial_2_corrected": ["schedule=colocated", "rollout.max_staleness=2", CORRECTED],
    "one_step_off": ["schedule=one_step_off", *DIVIDED],
    "async_1": ["schedule=async", "rollout.max_staleness=1", *DIVIDED],
    "async_4": ["schedule=async", "rollout.max_staleness=4", *DIVIDED],
}
NEAR = ("partial", "one_step_off", "async_1")  # of staleness 1
SEEDS = (0, 1, 2)
ACCURACY = "eval/arithmetic/accuracy"
LAG = "rollout/weight_version_lag/mean"
EVAL_EVERY = 10
Band = tuple[float, float | None]  # mean, and twice its standard error


def main() -> None:
    given = cells_parser(__doc__, SCHEDULES, Path("runs/learning_by_schedule")).parse_args()
    show(run_cells(given.cells, given.steps, given.out, lambda cell: run(cell, given.steps, given.out)))


def cells_parser(text: str | None, names: Iterable[str], out: Path) -> argparse.ArgumentParser:
    """Make the command line of a bench whose cells are names and seeds."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = [f"{name}/{seed}" for seed in SEEDS for name in names]
    parser.add_argument("--cells", nargs="*", choices=cells, default=cells, metavar="NAME/SEED")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=out)
    return parser


def run_cells(
    cells: Sequence[str], steps: int, out: Path, run_cell: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run what OUT/cells.jsonl lacks of the cells, and append each when it ends; return all of so many steps there."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / "cells.jsonl"
    for cell in cells:
        if not any(done["cell"] == cell and done["steps"] == steps for done in read(results)):
            done = run_cell(cell)
            with results.open("a") as file:
                file.write(json.dumps(done) + "\n")
    return [done for done in read(results) if done["steps"] == steps]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(cell: str, steps: int, out: Path) -> dict[str, Any]:
    schedule, seed = cell.split("/")
    folder = out / f"{schedule}_seed{seed}_{steps}"
    settings = [f"run.steps={steps}", f"run.eval_every={EVAL_EVERY}", "run.export=false"]
    train(folder, int(seed), *settings, *SCHEDULES[schedule])
    metrics = read(folder / "metrics.jsonl")
    ages = [line[LAG] for line in metrics if LAG in line]
    curve = {str(int(line["step"])): line[ACCURACY] for line in metrics if ACCURACY in line}
    return {"cell": cell, "steps": steps, "accuracy": curve, "lag": statistics.fmean(ages)}


def by_name(cells: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the cells of each schedule, or preset: those of its seeds."""
    named = defaultdict[str, list[dict[str, Any]]](list)
    for cell in cells:
        named[cell["cell"].split("/")[0]].append(cell)
    return named


def accuracies(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Return mean and range over seeds, by step."""
    columns = zip(*(cell["accuracy"].values() for cell in cells), strict=True)
    return [f"{statistics.fmean(one):.1%} ({min(one):.1%} to {max(one):.1%})" for one in columns]


def show(cells: list[dict[str, Any]]) -> None:
    if not cells:
        return
    steps = (f"step {step}" for step in cells[0]["accuracy"])
    table = Table("schedule", "seeds", "lag", *steps, "twice the standard error of the last")
    bands = {}
    for schedule, seeds in by_name(cells).items():
        last = [list(cell["accuracy"].values())[-1] for cell in seeds]
        error = 2 * statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
        bands[schedule] = (statistics.fmean(last), error)
        lag = statistics.fmean(cell["lag"] for cell in seeds)
        said = "-" if error is None else f"{error:.1%}"
        table.add_row(schedule, str(len(seeds)), f"{lag:.2f}", *accuracies(seeds), said)
    Console(width=180).print(table)
    if apart := [name for name in NEAR if not _overlap(bands.get(name), bands.get("colocated"))]:
        sys.exit(f"apart from colocated: {', '.join(apart)}")


def _overlap(band: Band | None, other: Band | None) -> bool:
    """Return whether two bands overlap; True where there are too few seeds for one."""
    if band is None or other is None or band[1] is None or other[1] is None:
        return True
    return abs(band[0] - other[0]) <= band[1] + other[1]


if __name__ == "__main__":
    main()
