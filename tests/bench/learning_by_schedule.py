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
from collections.abc import Callable, Sequence
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = [f"{schedule}/{seed}" for seed in SEEDS for schedule in SCHEDULES]
    parser.add_argument("--cells", nargs="*", choices=cells, default=cells, metavar="SCHEDULE/SEED")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/learning_by_schedule"))
    given = parser.parse_args()
    show(run_cells(given.cells, given.steps, given.out, lambda cell: run(cell, given.steps, given.out)))


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


def show(cells: list[dict[str, Any]]) -> None:
    if not cells:
        return
    steps = list(cells[0]["accuracy"])
    curves = defaultdict[str, list[list[float]]](list)
    for cell in cells:
        curves[cell["cell"].split("/")[0]].append(list(cell["accuracy"].values()))
    lags = defaultdict[str, list[float]](list)
    for cell in cells:
        lags[cell["cell"].split("/")[0]].append(cell["lag"])
    table = Table(
        "schedule", "seeds", "lag", *(f"step {step}" for step in steps), "twice the standard error of the last"
    )
    for schedule, runs in curves.items():
        columns = list(zip(*runs, strict=True))
        last = columns[-1]
        error = 2 * statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
        texts = [f"{statistics.fmean(c):.1%} ({min(c):.1%} to {max(c):.1%})" for c in columns]
        table.add_row(
            schedule,
            str(len(runs)),
            f"{statistics.fmean(lags[schedule]):.2f}",
            *texts,
            "-" if error is None else f"{error:.1%}",
        )
    Console(width=180).print(table)
    if apart := [name for name in NEAR if not _overlap(curves[name], curves["colocated"])]:
        sys.exit(f"apart from colocated: {', '.join(apart)}")


def _overlap(runs: list[list[float]], others: list[list[float]]) -> bool:
    bands = [[curve[-1] for curve in curves] for curves in (runs, others)]
    if any(len(band) < 2 for band in bands):
        return True
    widths = [2 * statistics.stdev(band) / len(band) ** 0.5 for band in bands]
    return abs(statistics.fmean(bands[0]) - statistics.fmean(bands[1])) <= sum(widths)


if __name__ == "__main__":
    main()
