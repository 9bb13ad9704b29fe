"""PPO beside what does without its critic: `python -m tests.bench.ppo_beside_grpo [--cells ppo/0 ...] [--steps 40]`.

A cell is a preset and a seed, of the seed's own cold start (made where it is missing, as launch/quickstart.sh does).
All train on the same prompts and number of samples, by the settings of configs/tiny_moe.yaml, its KL weight among them.
A cell's figures are appended to OUT/cells.jsonl when it ends, and a cell that stands there is not run again: the bench
can be broken off, and run in parts.

Prints held-out accuracy by samples (mean over seeds, and their range), seconds of a step (generate, logprob, train),
the largest memory of a rank's process in TRAIN; and how much more of it PPO has than GRPO, beside what the plan says
of a critic: at this size the memory of a process varies by more.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_mp.config import Settings, load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from tests.bench.learning_by_schedule import ACCURACY, SEEDS, accuracies, by_name, cells_parser, read, run_cells
from tests.bench.quickstart_run import CONFIG, make_model, train

MIB = 2**20
# The policy's rate is 4e-4, rewards go up to 1.5; lam is what the figures of the guide were made with.
CRITIC = ("algorithm.lam=0.95", "critic.lr=1e-3", "critic.cliprange_value=0.5")
PRESETS: dict[str, tuple[str, ...]] = {"grpo": (), "ppo": CRITIC, "rloo": (), "reinforce_pp": ()}
TIMES = ("time/generate_s", "time/logprob_s", "time/train_s")
MEMORY = "memory/train/host_bytes"


def main() -> None:
    parser = cells_parser(__doc__, PRESETS, Path("runs/ppo_beside_grpo"))
    parser.add_argument("--eval-every", type=int, default=10)
    given = parser.parse_args()
    done = run_cells(
        given.cells, given.steps, given.out, lambda cell: run(cell, given.steps, given.eval_every, given.out)
    )
    show(done, planned_bytes())


def overrides(preset: str, steps: int, eval_every: int) -> list[str]:
    lengths = [f"run.steps={steps}", f"run.eval_every={eval_every}", "run.export=false"]
    return [*lengths, f"algorithm.preset={preset}", *PRESETS[preset]]


def run(cell: str, steps: int, eval_every: int, out: Path) -> dict[str, Any]:
    preset, seed = cell.split("/")
    folder = out / f"{preset}_seed{seed}_{steps}"
    train(folder, int(seed), *overrides(preset, steps, eval_every))
    metrics = read(folder / "metrics.jsonl")
    samples = load_settings(Path(CONFIG)).samples_per_step
    curve = {str(int(line["step"]) * samples): line[ACCURACY] for line in metrics if ACCURACY in line}
    trained = [line for line in metrics if line["step"] > 1]  # the first warms up
    seconds = {name: statistics.median(line[name] for line in trained) for name in TIMES}
    measured = {"seconds": seconds, "host_bytes": max(line[MEMORY] for line in trained)}
    return {"cell": cell, "steps": steps, "accuracy": curve} | measured


def planned_bytes() -> float:
    """Return what the plan says that a critic's weights, gradients and optimizer take of a rank."""
    model, _ = make_model(SEEDS[0])
    settings: Settings = load_settings(Path(CONFIG), [f"model.path={model}", *overrides("ppo", 1, 0)])
    job = make_job(settings, settings.model.read_config(), read_cluster("h100-80"), 1, gpus_per_node=2)
    (count,) = job.critic.parameter_counts
    each = job.per_parameter
    return count.total * (each.weights + each.gradients) + job.sharded_parameters(count) * each.optimizer


def show(cells: Iterable[dict[str, Any]], planned: float) -> None:
    by_preset = by_name(cells)
    if not by_preset:
        return
    samples = list(next(iter(by_preset.values()))[0]["accuracy"])
    table = Table(
        *("preset", "seeds", *(f"{int(count):,} samples" for count in samples)),
        *("generate s", "logprob s", "train s", "a rank's memory, MiB"),
    )
    for preset, runs in by_preset.items():
        table.add_row(
            preset,
            str(len(runs)),
            *accuracies(runs),
            *(f"{statistics.fmean(each['seconds'][name] for each in runs):.2f}" for name in TIMES),
            f"{memory_of(runs) / MIB:,.0f}",
        )
    Console(width=180).print(table)
    if {"ppo", "grpo"} <= by_preset.keys():
        more = (memory_of(by_preset["ppo"]) - memory_of(by_preset["grpo"])) / MIB
        Console(width=180).print(
            f"ppo holds {more:,.1f} MiB more than grpo; planned for a critic: {planned / MIB:,.1f}"
        )


def memory_of(runs: Iterable[dict[str, Any]]) -> float:
    return statistics.fmean(each["host_bytes"] for each in runs)


if __name__ == "__main__":
    main()
