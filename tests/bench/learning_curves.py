"""Presets on the quickstart task: `python -m tests.bench.learning_curves --presets grpo dapo --seeds 0 1 2 --steps 30`.

Every run starts from its seed's cold start (made where it is missing, as launch/quickstart.sh does) and differs in
`algorithm=PRESET` alone. Four updates a step: with one every ratio is 1, and presets that act on ratios are all alike.
A KL weight of 1e-6, too small to act, loads the reference that the KL is measured against.
Prints a table and writes curves.svg: the mean over seeds of every column, with a band of their standard deviation.
Reach: each learns.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_mp.monitor.report.charts import Chart, Series
from tests.bench.picture import write_charts
from tests.bench.quickstart_run import train
from tests.e2e.jobs import read_jsonl

PRESETS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo", "luspo", "vespo", "grpo_pp")
COLUMNS = {
    "accuracy": "eval/arithmetic/accuracy",
    "reward": "reward/mean",
    "length": "rollout/response_length/mean",
    "wrong length": "rollout/response_length/incorrect",
    "KL": "train/kl_loss",
    "entropy": "train/entropy",
}
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of Student's t, by number of seeds
Steps = list[dict[str, Any]]
Points = list[tuple[int, float]]


def main() -> None:
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
            train(run, seed, f"algorithm={preset}", f"run.steps={args.steps}", *always(), *args.overrides)
            runs[preset].append(read_jsonl(run / "metrics.jsonl"))
    show(runs)
    write_charts(charts(runs), args.out / "curves.svg")


def always() -> list[str]:
    return ["run.eval_every=10", "run.export=false", "algorithm.kl.coef=1.0e-6", "training.updates_per_step=4"]


def show(runs: dict[str, list[Steps]]) -> None:
    table = Table("preset", *COLUMNS, title="first -> last of each seed; mean, 95 % interval by t")
    for preset, seeds in runs.items():
        table.add_row(preset, *(_cell([points(steps, name) for steps in seeds]) for name in COLUMNS.values()))
    Console(width=170).print(table)


def _cell(curves: list[Points]) -> str:
    known = [curve for curve in curves if curve]
    lines = [f"{curve[0][1]:.3g} -> {curve[-1][1]:.3g}" for curve in known]
    last = [curve[-1][1] for curve in known]
    if not known:
        return "-"
    error = f" ± {T[len(last)] * statistics.stdev(last) / len(last) ** 0.5:.2g}" if len(last) in T else ""
    return "\n".join([*lines, f"mean {statistics.fmean(last):.3g}{error}"])


def points(steps: Steps, name: str) -> Points:
    return [(step["step"], step[name]) for step in steps if step.get(name) is not None]


def charts(runs: dict[str, list[Steps]]) -> list[Chart]:
    """One chart for each column; of each preset the mean over its seeds, with a band of their standard deviation."""
    return [
        Chart(title, name, tuple(_series(number, *item, name) for number, item in enumerate(runs.items())))
        for title, name in COLUMNS.items()
    ]


def _series(number: int, preset: str, seeds: list[Steps], name: str) -> Series:
    by_step: dict[int, list[float]] = {}
    for step, value in (point for steps in seeds for point in points(steps, name)):
        by_step.setdefault(step, []).append(value)
    steps = tuple(sorted(by_step))
    means = [statistics.fmean(by_step[step]) for step in steps]
    errors = [statistics.stdev(by_step[step]) if len(by_step[step]) > 1 else 0.0 for step in steps]
    low = tuple(mean - error for mean, error in zip(means, errors, strict=True))
    high = tuple(mean + error for mean, error in zip(means, errors, strict=True))
    banded = len(seeds) > 1
    return Series(preset, steps, tuple(means), low if banded else (), high if banded else (), style=number)


if __name__ == "__main__":
    main()
