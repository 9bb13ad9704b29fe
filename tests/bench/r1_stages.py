"""R1's stages in small over several seeds, in one table and one picture: `python -m tests.bench.r1_stages 0 1 2`.

Each seed makes its own data, base and student, and runs configs/tiny_r1_pipeline.yaml with two stages more beside it:
`zero`, the first RL on the base itself, which is R1-Zero's way, and `sft_alone`, the cold start's examples for twice
its epochs. Shown are means over seeds on held-out problems, ± the standard deviation over seeds; four samples each at
temperature 1.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from grpo_mp.monitor.evaluation import EvalScore, read_scores
from tests.bench.quickstart_run import grpo_mp, make_task

CONFIG = Path("configs/tiny_r1_pipeline.yaml")
SET = "arithmetic"
STEM = "runs/tiny_r1_seed"
PICTURE = Path("runs/tiny_r1_seeds.svg")
BESIDE = ("zero", "sft_alone")
SHOWN: Mapping[str, Callable[[EvalScore], float]] = {
    "accuracy, %": lambda score: 100 * (score.accuracy or 0.0),
    "pass@4, %": lambda score: 100 * score.pass_at[4].value,
    "form, %": lambda score: 100 * score.reward_terms["boxed"],
    "tokens": lambda score: score.length,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--only-read", action="store_true", help=f"do not run, only read {STEM}*")
    args = parser.parse_args()
    if not args.only_read:
        for seed in args.seeds:
            run(seed)
    scores = [read_stages(Path(f"{STEM}{seed}")) for seed in args.seeds]
    Console(width=140).print(make_table(scores))
    plot(scores).savefig(PICTURE)


def run(seed: int) -> None:
    made = ["--data", f"data/tiny_r1_seed{seed}", "--seed", str(seed)]
    for family, name in (("deepseek_v3", "base"), ("qwen3", "student")):
        model = Path(f"checkpoints/tiny_r1_seed{seed}_{name}")
        if not (model / "config.json").exists():
            make_task("--family", family, "--out", str(model), *made)
    file = Path(f"{STEM}{seed}.yaml")
    file.parent.mkdir(exist_ok=True)
    file.write_text(make_pipeline(CONFIG.read_text(), seed))
    grpo_mp("pipeline", str(file), "--ranks", "2")


def make_pipeline(recipe: str, seed: int) -> str:
    """Return the file of a recipe's pipeline with a seed's models, data and folder, and the two stages beside it."""
    for folder in ("checkpoints", "data", "runs"):
        recipe = recipe.replace(f"{folder}/tiny_r1", f"{folder}/tiny_r1_seed{seed}")
    tree: dict[str, Any] = yaml.safe_load(recipe)
    stages = tree["stages"]
    zero = {**stages["reasoning"], "settings": {**stages["reasoning"]["settings"], "model.path": tree["base"]}}
    cold_start = stages["cold_start"]["settings"]
    longer = {**cold_start, "run.epochs": 2 * cold_start["run.epochs"]}
    stages |= dict(zip(BESIDE, (zero, {**stages["cold_start"], "settings": longer}), strict=True))
    for part in (tree["evaluation"], *stages.values()):
        part["config"] = str(CONFIG.parent.resolve() / part["config"])
        part["settings"]["run.seed"] = seed
    return yaml.safe_dump(tree, sort_keys=False)


def read_stages(folder: Path) -> dict[str, EvalScore]:
    """Return the held-out score after each stage, by name, in the order in which they ran."""
    files = sorted((folder / "evaluate").glob("*/eval.json"), key=lambda file: file.stat().st_mtime_ns)
    return {file.parent.name: read_scores(file)[SET] for file in files}


def make_table(seeds: Sequence[Mapping[str, EvalScore]]) -> Table:
    table = Table("after", *SHOWN, "cut off, %")
    for stage in seeds[0]:
        found = [seed[stage] for seed in seeds]
        cells = [spread(map(value, found)) for value in SHOWN.values()]
        table.add_row(stage, *cells, spread(100 * score.truncated_ratio for score in found))
    return table


def spread(values: Any) -> str:
    found = list(values)
    return f"{fmean(found):.1f}" + (f" ± {stdev(found):.1f}" if len(found) > 1 else "")


def plot(seeds: Sequence[Mapping[str, EvalScore]]) -> Figure:
    """Plot what stages bring: bars are means over seeds, points each seed; what is beside the pipeline is gray."""
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(2, 1, 1, 1))
    stages = [*(stage for stage in seeds[0] if stage not in BESIDE), *BESIDE]
    for row, (label, value) in zip(axes, SHOWN.items(), strict=True):
        for stage in stages:
            values = [value(seed[stage]) for seed in seeds]
            row.bar(stage, fmean(values), color="tab:gray" if stage in BESIDE else "tab:blue", alpha=0.7)
            row.plot([stage] * len(values), values, "k.", markersize=4)
        row.set_ylabel(label)
        row.set_ylim(0, 100 if label.endswith("%") else None)
    axes[0].set_title(f"held-out problems: mean of {len(seeds)} seeds; points: each")
    axes[-1].tick_params(axis="x", rotation=30)
    return figure


if __name__ == "__main__":
    main()
