"""Runs that go wrong in a known way: `python -m tests.bench.sicknesses NAME...`, `--list` lists them.

Each is the quickstart's tiny run, smaller, with some settings changed (and its cold-started model, made where it is
missing). Prints what the rules of grpo_mp/monitor/rules.yaml find in it; exit status 1 where its rule is silent.
Minutes each on two cores. `python -m tests.bench.gallery` makes a page of them.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from grpo_mp.monitor.rules import MetricLine, find_warnings
from grpo_mp.monitor.run_folder import read_metrics
from tests.bench.quickstart_run import make_model, train
from tools.tiny.models import make_tiny

SEED = 0
DATA = f"data/arithmetic_seed{SEED}"
EVALUATED = f"data.eval={{arithmetic: {{path: {DATA}/eval.jsonl, samples: 4}}}}"
UNSOLVABLE = f"{DATA}/unsolvable.jsonl"
MANY_EXPERTS = "checkpoints/tiny_many_experts"
PARTS = "tests/bench/sick_parts.py"
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
    steps: int = 30


def _paid(name: str, weight: float) -> str:
    return f"reward.functions={{{PARTS}:{name}: {weight}}}"


SICKNESSES = {
    HEALTHY: Sickness(
        "Nothing: it learns, and no rule finds anything. Its steps have eight times the samples of the "
        "others', with which the same rate is not too high.",
        "",
        ("rollout.prompts_per_step=32", "rollout.group_size=8"),
    ),
    "length_explosion": Sickness(
        "A reward pays for length, more than the right answer is worth, and the limit is far away.",
        "length_explosion",
        (_paid("long", 4), "rollout.max_response_tokens=64", "algorithm.kl.coef=0", "optimizer.lr=1e-3"),
        steps=40,
    ),
    "length_collapse": Sickness(
        "A reward pays for brevity, more than the right answer is worth, and the rate is high.",
        "length_collapse",
        (_paid("short", 4), "algorithm.kl.coef=0", "optimizer.lr=1e-3"),
    ),
    "reward_hacking": Sickness(
        "A judge likes what has nothing to do with being right, here numbers that begin with 1, and its word counts "
        "for more than the right answer.",
        "reward_parts_diverge",
        (_paid("biased", 2), "algorithm.kl.coef=0"),
    ),
    "hacked_evaluation": Sickness(
        "The same judge, seen from outside: what the held-out problems ask for is evaluated every third step.",
        "reward_hacking",
        (_paid("biased", 2), "algorithm.kl.coef=0", EVALUATED, "run.eval_every=3"),
    ),
    "format_without_answer": Sickness(
        "The problems are too hard (here their answers are wrong), and the reward pays for the form, too.",
        "format_without_answer",
        (f"data.train={UNSOLVABLE}", "rollout.prompts_per_step=16", "rollout.group_size=8"),
        steps=15,
    ),
    "zero_variance": Sickness(
        "The reward cannot tell answers apart: it pays for a form that all have, and groups are small.",
        "zero_variance",
        ("reward={answer: 0.0, boxed: 1.0}", "rollout.group_size=2"),
        steps=12,
    ),
    "kl_drift": Sickness(
        "The rate is too high, and the KL to the reference is measured, but weighs nothing.",
        "kl_drift",
        ("algorithm.kl.coef=1e-6", "optimizer.lr=5e-3"),
        steps=25,
    ),
    "collapse": Sickness(
        "Several updates of a step at a rate that is far too high: the policy gives one answer to everything.",
        "entropy_collapse",
        ("training.updates_per_step=4", "optimizer.lr=3e-3", "algorithm.kl.coef=0"),
        steps=20,
    ),
    "effective_sample_size": Sickness(
        "Many updates of a step at a high rate, and nothing clips their ratios.",
        "effective_sample_size",
        (
            "training.updates_per_step=8",
            "optimizer.lr=2e-3",
            "algorithm.clip={low: 1.0, high: 100.0}",
            "rollout.prompts_per_step=16",
        ),
        steps=15,
    ),
    "clip_share": Sickness(
        "Ratios of whole answers, whose clip is narrow, and eight updates of a step: after the first of them most "
        "answers are beyond the clip.",
        "clip_share",
        (
            "algorithm=gspo",
            "training.updates_per_step=8",
            "optimizer.lr=1e-4",
            "rollout.prompts_per_step=16",
            "rollout.group_size=8",
        ),
        steps=10,
    ),
    "expert_collapse": Sickness(
        "What balances the routers has the wrong sign: experts that have more tokens than others get still more. The "
        "model, with sixteen of which a token takes two, is a random one.",
        "expert_collapse",
        (f"model.path={MANY_EXPERTS}", _paid("long", 1), "training.megatron_args={moe_router_bias_update_rate: -0.02}"),
        steps=20,
    ),
    "truncation": Sickness(
        "The limit of the answers is shorter than what the policy has to say.",
        "truncation",
        ("rollout.max_response_tokens=10",),
        steps=12,
    ),
    "overhead": Sickness(
        "A part of the user's own, here the curriculum, thinks for two seconds in each step while devices wait.",
        "overhead",
        (f"algorithm.curriculum={{function: '{PARTS}:slow'}}",),
        steps=15,
    ),
    "slow_rank": Sickness(
        "One rank, which is a replica of the policy, takes longer for each layer, as on a device whose clock is low.",
        "slow_rank",
        (f"algorithm.curriculum={{function: '{PARTS}:slow_rank'}}", "layout={expert: 1}"),
        steps=15,
    ),
    "reward_failures": Sickness(
        "A reward function raises for about every fourth group, and the run goes on with a value in its place.",
        "reward_failures",
        (_paid("failing", 0.01), "reward.on_error=0.0"),
        steps=8,
    ),
    "skipped_updates": Sickness(
        "Updates whose gradient is above a limit are left out, and the limit is below what is usual.",
        "skipped_updates",
        ("optimizer.skip_grad_norm=0.45",),
        steps=8,
    ),
    "slow_engine": Sickness(
        "One of two engines gets a tenth of the time of its core, as on a GPU that another process uses.",
        "slow_engine",
        (f"algorithm.curriculum={{function: '{PARTS}:slow_engine'}}", "rollout.prompts_per_step=16"),
        steps=15,
    ),
    "staleness": Sickness(
        "Engines run up to three steps ahead of a trainer that makes eight updates in each.",
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
    "mismatch_by_routing": Sickness(
        "Experts are replayed that routers chose up to three steps of eight updates ago, at a high rate.",
        "routing_mismatch",
        (
            "schedule=async",
            "engine.ranks=1",
            "layout={expert: 1}",
            "rollout.max_staleness=3",
            "training.updates_per_step=8",
            "training.router_replay=R3",
            "sync.pause=in_place",
            "algorithm.rollout_correction={kind: truncate, high: 2.0}",
            "optimizer.lr=2e-3",
        ),
        steps=15,
    ),
}


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
    sickness, folder = SICKNESSES[name], out / name
    model, data = make_model(SEED)
    write_unsolvable(data)
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    make_tiny(Path(MANY_EXPERTS), "deepseek_v3", AutoTokenizer.from_pretrained(model), SEED, **experts)
    if len(read_metrics(folder / "metrics.jsonl")) <= sickness.steps:  # there is a line of step 0, too
        train(folder, SEED, *BASE, f"run.steps={sickness.steps}", *sickness.overrides)
    return list(read_metrics(folder / "metrics.jsonl"))


def write_unsolvable(data: Path) -> None:
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    others = [row["answer"] for row in rows[7:] + rows[:7]]
    wrong = [json.dumps(row | {"answer": answer}) + "\n" for row, answer in zip(rows, others, strict=True)]
    (data / "unsolvable.jsonl").write_text("".join(wrong))


def show(name: str, lines: list[MetricLine]) -> bool:
    """Print what the rules find; return whether the sickness was found, or, of a healthy run, none."""
    found, rule = find_warnings(lines), SICKNESSES[name].rule
    for one in found:
        print(f"{name}: {one.weight} {one.rule}, steps {one.first_step} to {one.last_step}: {one.sentence}")
    right = rule in {one.rule for one in found} if rule else not found
    verdict = "as expected" if right else f"NOT as expected, which was: {rule or 'no warning'}"
    print(f"{name}: {verdict}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(main())
