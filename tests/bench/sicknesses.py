"""Runs that go wrong in a known way: `python -m tests.bench.sicknesses NAME...`, `--list` lists them.

Each is the quickstart's tiny run, smaller, with some settings changed (and its cold-started model, made where it is
missing). Prints what the rules of grpo_mp/monitor/rules.yaml find in it; exit status 1 where its rule is silent.
`--record` writes the metrics that rules look at to tests/monitor/sick/NAME.jsonl.
Minutes each on two cores.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from grpo_mp.monitor.loggers import read_metrics
from grpo_mp.monitor.rules import RULES, MetricLine, find_warnings

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "monitor" / "sick"
MODEL, DATA = "checkpoints/tiny_deepseek_v3_seed0", "data/arithmetic_seed0"
PARTS = "tests/bench/sick_parts.py"
BASE = (
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "run.eval_every=0",
    "run.save_every=0",
    "run.export=false",
    "data.eval={}",
    "optimizer.lr_schedule=constant",
)


@dataclass(frozen=True)
class Sickness:
    """What is changed, for how many steps, and the rule that must find it."""

    rule: str
    overrides: tuple[str, ...]
    steps: int = 30


def _paid(name: str, weight: float) -> str:
    return f"reward.functions={{{PARTS}:{name}: {weight}}}"


SICKNESSES = {
    "healthy": Sickness("", ("algorithm.kl.coef=0.02",)),
    "length_explosion": Sickness(
        "length_explosion",
        (_paid("long", 4), "rollout.max_response_tokens=64", "algorithm.kl.coef=0", "optimizer.lr=1e-3"),
        steps=40,
    ),
    "length_collapse": Sickness("length_collapse", (_paid("short", 4), "algorithm.kl.coef=0", "optimizer.lr=1e-3")),
    "reward_hacking": Sickness("reward_parts_diverge", (_paid("short", 4), "algorithm.kl.coef=0")),
    "format_without_answer": Sickness("format_without_answer", (f"data.train={DATA}/unsolvable.jsonl",), steps=20),
    "zero_variance": Sickness("zero_variance", ("reward={answer: 0.0, boxed: 1.0}", "rollout.group_size=2"), steps=12),
    "kl_drift": Sickness("kl_drift", ("algorithm.kl.coef=1e-6", "optimizer.lr=5e-3"), steps=25),
    "collapse": Sickness(
        "entropy_collapse", ("training.updates_per_step=8", "optimizer.lr=1e-2", "algorithm.kl.coef=0"), steps=15
    ),
    "truncation": Sickness("truncation", ("rollout.max_response_tokens=10",), steps=12),
    "overhead": Sickness("overhead", (f"algorithm.curriculum={{function: '{PARTS}:slow'}}",), steps=15),
    "host_memory_creeps": Sickness("host_memory_creeps", (_paid("leaking", 0.01),), steps=60),
    "reward_failures": Sickness("reward_failures", (_paid("failing", 0.01), "reward.on_error=0.0"), steps=8),
    "skipped_updates": Sickness(
        "skipped_updates", ("optimizer.skip_grad_norm=0.05", "optimizer.max_skipped_updates=99"), steps=8
    ),
    "staleness": Sickness(
        "staleness",
        (
            "schedule=async",
            "engine.ranks=1",
            "layout={expert: 1}",
            "rollout.max_staleness=3",
            "training.updates_per_step=8",
            "algorithm.rollout_correction={kind: truncate, high: 2.0}",
        ),
        steps=15,
    ),
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/sick"))
    args = parser.parse_args()
    if unknown := {*args.names} - {*SICKNESSES}:
        parser.error(f"{', '.join(sorted(unknown))}: no sickness; there are {', '.join(SICKNESSES)}")
    if args.list:
        for name, one in SICKNESSES.items():
            print(f"{name}: {' '.join(one.overrides)}")
        return 0
    right = [show(name, run(name, args.out), args.record) for name in args.names or SICKNESSES]
    return 0 if all(right) else 1


def run(name: str, out: Path) -> list[MetricLine]:
    """Train, unless the run is there and complete; return its metrics."""
    sickness, folder = SICKNESSES[name], out / name
    grpo_mp = (sys.executable, "-m", "grpo_mp")
    if not (ROOT / MODEL / "config.json").exists():
        arguments = ("--family", "deepseek_v3", "--out", MODEL, "--data", DATA, "--seed", "0", "--cold-start", "0.4")
        subprocess.run([*grpo_mp, "make-tiny", *arguments], cwd=ROOT, check=True)
    write_unsolvable(ROOT / DATA)
    settings = (*BASE, *sickness.overrides, f"run.folder={folder}", f"run.steps={sickness.steps}")
    if len(read_metrics(ROOT / folder / "metrics.jsonl")) <= sickness.steps:
        subprocess.run([*grpo_mp, "train", "configs/tiny_moe.yaml", "--ranks", "2", *settings], cwd=ROOT, check=True)
    return list(read_metrics(ROOT / folder / "metrics.jsonl"))


def write_unsolvable(data: Path) -> None:
    """Write the train problems with the answers of other problems."""
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    others = [row["answer"] for row in rows[7:] + rows[:7]]
    wrong = [json.dumps(row | {"answer": answer}) + "\n" for row, answer in zip(rows, others, strict=True)]
    (data / "unsolvable.jsonl").write_text("".join(wrong))


def show(name: str, lines: list[MetricLine], record: bool) -> bool:
    """Print what the rules find, and record what they look at; return whether the sickness was found."""
    found, rule = find_warnings(lines), SICKNESSES[name].rule
    for one in found:
        print(f"{name}: {one.weight} {one.rule}, steps {one.first_step} to {one.last_step}: {one.sentence}")
    right = rule in {one.rule for one in found} if rule else not found
    print(f"{name}: {'as expected' if right else f'NOT as expected, which was: {rule}'}", flush=True)
    if record:
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in recorded(lines)))
    return right


def recorded(lines: Iterable[MetricLine]) -> list[MetricLine]:
    """Return of each line what rules look at, in five digits."""
    patterns = [re.compile("[^/]+".join(map(re.escape, name.split("*")))) for rule in RULES for name in rule.when]
    return [
        {
            name: value if value is None else float(f"{value:.5g}")
            for name, value in line.items()
            if name == "step" or any(pattern.fullmatch(name) for pattern in patterns)
        }
        for line in lines
    ]


if __name__ == "__main__":
    sys.exit(main())
