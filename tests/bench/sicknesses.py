"""Runs that go wrong in a known way: `python -m tests.bench.sicknesses NAME...`, `--list` lists them.

Each is the quickstart's tiny run, smaller, with the settings changed that sicknesses.yaml has, from the quickstart's
cold-started model, made where it is missing. Prints what the rules of grpo_mp/monitor/rules.yaml find in it; the exit
status is 1 where its rule is silent. Minutes each on two cores. `python -m tests.bench.gallery` makes a page of them.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from grpo_mp.monitor.rules import MetricLine, find_warnings
from grpo_mp.monitor.run_folder import read_metrics
from tests.bench.quickstart_run import make_model, train
from tools.tiny.models import make_tiny

SEED = 0
MANY_EXPERTS = "checkpoints/tiny_many_experts"
HEALTHY = "healthy"
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
    """Why a run goes wrong, by which settings, in how many steps; the rule that must find it, "" for none."""

    cause: str
    rule: str
    overrides: tuple[str, ...]
    steps: int


def read_sicknesses(file: Path) -> dict[str, Sickness]:
    """Return the sicknesses of a YAML file by name."""
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {
        name: Sickness(one["cause"], one.get("rule", ""), tuple(one["settings"]), one.get("steps", 30))
        for name, one in entries.items()
    }


SICKNESSES = read_sicknesses(Path(__file__).with_suffix(".yaml"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    args = with_names(parser)
    if args.list:
        for name, one in SICKNESSES.items():
            print(f"{name}: {one.cause} {' '.join(one.overrides)}")
        return 0
    right = [show(name, run(name, args.out)) for name in args.names or SICKNESSES]
    return 0 if all(right) else 1


def with_names(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a command line that names sicknesses, and where their runs are."""
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/sick"))
    args = parser.parse_args()
    if unknown := {*args.names} - {*SICKNESSES}:
        parser.error(f"{', '.join(sorted(unknown))}: no sickness; there are {', '.join(SICKNESSES)}")
    return args


def run(name: str, out: Path) -> list[MetricLine]:
    """Train, unless the run is there and complete; return its metrics."""
    sickness = SICKNESSES[name]
    folder = out / name
    model, data = make_model(SEED)
    write_unsolvable(data)
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    make_tiny(Path(MANY_EXPERTS), "deepseek_v3", AutoTokenizer.from_pretrained(model), SEED, **experts)
    if len(read_metrics(folder / "metrics.jsonl")) <= sickness.steps:  # there is a line of step 0, too
        train(folder, SEED, *BASE, f"run.steps={sickness.steps}", *sickness.overrides)
    return list(read_metrics(folder / "metrics.jsonl"))


def write_unsolvable(data: Path) -> None:
    """Write the problems with the answers of others."""
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    others = [row["answer"] for row in rows[7:] + rows[:7]]
    wrong = [json.dumps(row | {"answer": answer}) + "\n" for row, answer in zip(rows, others, strict=True)]
    (data / "unsolvable.jsonl").write_text("".join(wrong))


def show(name: str, lines: list[MetricLine]) -> bool:
    """Print what the rules find; return whether the sickness was found, or, of a healthy run, none."""
    found = find_warnings(lines)
    rule = SICKNESSES[name].rule
    for one in found:
        print(f"{name}: {one.weight} {one.rule}, steps {one.first_step} to {one.last_step}: {one.sentence}")
    right = rule in {one.rule for one in found} if rule else not found
    verdict = "as expected" if right else f"NOT as expected, which was: {rule or 'no warning'}"
    print(f"{name}: {verdict}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(main())
