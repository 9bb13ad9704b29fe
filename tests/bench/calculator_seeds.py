"""The calculator's demonstration over several seeds, in one table: `python -m tests.bench.calculator_seeds 0 1 2`.

Each seed makes its own data and cold start and trains by configs/tiny_tools.yaml. Columns: accuracy before and after
training, with the tool and with it taken away, 4 samples each at temperature 1, on products which are neither in the
seed's train set nor in the eval set on which the settings were chosen; minutes of the cold start, and of training from
the first to the last event of the trace.
"""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_mp.algorithms.evaluation import read_scores
from tests.bench.quickstart_run import grpo_mp, make_task
from tests.bench.quickstart_seeds import fill, read_metrics, seconds
from tools.tiny.arithmetic import Problem, write_jsonl
from tools.tiny.products import make_problems

CONFIG, SET = "configs/tiny_tools.yaml", "products"
TRAIN, CHOSEN_ON, FRESH = 6000, 200, 200  # problems; the first two are the defaults of tools.tiny.make
COLD_START_FILE = "cold_start_s.json"


def main() -> None:
    """Command line."""
    table = Table("seed", "with tool: before", "after", "without: before", "after", "cold start min", "train min")
    fill(table, "runs/calculator_seed", __doc__, run, row)
    Console(width=120).print(table)


def run(seed: int, folder: Path) -> None:
    """Make a seed's model and data, train it, and evaluate it before and after without the tool."""
    model, data = Path(f"checkpoints/tiny_calculator_seed{seed}"), Path(f"data/calculator_seed{seed}")
    made = ["--family", "qwen3_moe", "--out", str(model), "--data", str(data), "--seed", str(seed)]
    started = time.monotonic()
    make_task("--task", "calculator", *made, "--train", str(TRAIN), "--cold-start", "0.3")
    cold_start_s = time.monotonic() - started
    write_jsonl(fresh_problems(seed), data / "fresh.jsonl")
    own = [f"run.seed={seed}", f"data.eval={{{SET}: {{path: {data}/fresh.jsonl, samples: 4}}}}"]
    paths = [f"run.folder={folder}", f"model.path={model}", f"data.train={data}/train.jsonl"]
    grpo_mp("train", CONFIG, "--ranks", "2", *own, *paths)
    for when, weights in (("before", model), ("after", folder / "final")):
        out = str(folder / f"without_{when}")
        grpo_mp("evaluate", CONFIG, "--model", str(weights), "--out", out, *own, "rollout.tools=[]")
    (folder / COLD_START_FILE).write_text(json.dumps(cold_start_s))


def fresh_problems(seed: int) -> list[Problem]:
    """Return those that follow a seed's train and eval sets in the order in which they were drawn."""
    _, held_out = make_problems(TRAIN, CHOSEN_ON + FRESH, seed)
    return held_out[CHOSEN_ON:]


def accuracies(folder: Path) -> list[float]:
    """Return a run's accuracy before and after with the tool, and before and after without it."""
    metric = f"eval/{SET}/accuracy"
    shares = [step[metric] for step in read_metrics(folder) if metric in step]
    without = [read_scores(folder / f"without_{when}/eval.json")[SET].accuracy for when in ("before", "after")]
    return [shares[0], shares[-1], *(share or 0.0 for share in without)]


def row(folder: Path) -> list[str]:
    """One run's figures as text."""
    minutes = [json.loads((folder / COLD_START_FILE).read_text()) / 60, seconds(folder) / 60]
    return [*(f"{share:.1%}" for share in accuracies(folder)), *(f"{value:.1f}" for value in minutes)]


if __name__ == "__main__":
    main()
