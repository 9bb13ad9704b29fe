"""TRL's GRPOTrainer beside this project's loop on two cores: `python -m tests.bench.compare_trl`.

Needs `pip install --no-deps trl==1.16.0 accelerate==1.15.0`. Both train the same model in fp32, one AdamW update a
step, with the same KL weight and responses of the same given lengths: a tiny mixture of experts by 16 prompts of 256
tokens x 8 responses, or SmolLM2-135M by 4 short questions x 4 responses of 16 to 128 tokens. TRL generates with
transformers, by one process of two threads and by two of one; the better counts. Ours has two ranks of one thread for
the tiny models, one rank of two threads for SmolLM2, whose engine reads the weights for each token. A step is the time
from one update's end to the next (TRL), from one GENERATE's begin to the next (ours); the first step is left out.

Ours computes the prompt of a group once in training (training.share_prompts), as engines do when they generate; TRL
has no such mode. Reach, on an idle machine: samples/s at least 4 times TRL's for qwen3_moe, 12 times for deepseek_v3,
2.5 times for smollm2.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from grpo_mp.monitor.timeline import read_trace, trace_path
from grpo_mp.utils.phases import Phase
from tests.bench.workload import SMOLLM2, describe, make_workload, read_sizes

TINY = ("qwen3_moe", "deepseek_v3")
RANKS = {SMOLLM2: 1}  # ours; 2 of others
# Two threads in all
TRL = "tests.bench.run_trl"
TRL_PROCESSES = (1, 2)
CORES = 2
TimeOurs = Callable[[Path, int, int], tuple[list[float], dict[str, float]]]  # seconds of steps, and of their phases


def main() -> None:
    for folder, family, given in workloads(__doc__, (*TINY, SMOLLM2)):
        compare(folder, family, given, time_ours)


def workloads(text: str | None, families: Sequence[str] = TINY) -> Iterator[tuple[Path, str, argparse.Namespace]]:
    """Read the command line of a comparison; yield a folder with the work of each family, and what was given."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=families, help="only this")
    parser.add_argument("--steps", type=int, default=4, help="steps of each side, the first one to warm up")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's, sequences")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for family in [given.family] if given.family else families:
        with tempfile.TemporaryDirectory() as name:
            print(f"{family}: {describe(make_workload(Path(name), family, given.seed))}", flush=True)
            yield Path(name), family, given


def compare(folder: Path, family: str, given: argparse.Namespace, time_ours: TimeOurs, *options: str) -> None:
    """Run every side; prints a line for each, ours with its ratio to the better of TRL's, which gets `options`."""
    best = math.inf
    samples = read_sizes(folder).samples
    for processes in TRL_PROCESSES:
        result = folder / f"trl_{processes}.json"
        micro_batch = min(given.micro_batch, samples // processes)
        sizes = ["--steps", str(given.steps), "--micro-batch", str(micro_batch), *options]
        run(TRL, [str(folder), str(result), *sizes], processes, CORES // processes)
        seconds = json.loads(result.read_text())  # of each step after the first
        best = min(best, statistics.median(seconds))
        print(line(f"TRL, {processes} x {CORES // processes} threads", family, seconds, samples), flush=True)
    ranks = RANKS.get(family, CORES)
    ours, phases = time_ours(folder, given.steps, ranks)
    side = f"grpo_mp, {ranks} x {CORES // ranks} threads"
    print(line(side, family, ours, samples), f"{best / statistics.median(ours):6.2f} x TRL", flush=True)
    if phases:
        print("    of it " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items()), flush=True)


def line(side: str, family: str, seconds: list[float], samples: int) -> str:
    median = statistics.median(seconds)
    spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
    return f"{side:24}{family:14}{median:8.2f} s/step ({spread}){samples / median:8.2f} samples/s"


def time_ours(folder: Path, steps: int, ranks: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step after the first, and of rank 0's phases in the median step.

    One more is run, whose begin ends the last.
    """
    run_folder = folder / "run"
    run("tests.bench.run_grpo_mp", [str(folder), str(run_folder), "--steps", str(steps + 1)], ranks, CORES // ranks)
    events = [event for event in read_trace(trace_path(run_folder, 0)) if event["ph"] in "BE"]
    begins = [event["ts"] / 1e6 for event in events if event["ph"] == "B" and event["name"] == "GENERATE"]
    phases: dict[str, list[float]] = {}
    for name in dict.fromkeys(event["name"] for event in events if event["name"] in Phase.__members__):
        edges = [event["ts"] / 1e6 for event in events if event["name"] == name]
        inside = [
            end - start for start, end in zip(edges[::2], edges[1::2], strict=True) if begins[1] <= start < begins[-1]
        ]
        phases |= {name: inside} if inside else {}
    medians = {name: statistics.median(seconds) for name, seconds in phases.items()}
    return [end - begin for begin, end in pairwise(begins)][1:], medians


def run(module: str, arguments: list[str], processes: int, threads: int) -> None:
    """Run a module in so many processes; its output is shown only where it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = torchrun if processes > 1 or module != TRL else []
    command = [sys.executable, *launcher, "-m", module, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{module} failed:\n{done.stdout[-4000:]}")


if __name__ == "__main__":
    main()
