"""Compare published steps with the expected ones: `python -m tests.bench.published_steps [--fit]`

Prints the table of the planner's page. With --fit, the shares of a cluster's peaks that fit the rows marked
`fitted` best (least sum of squared logarithms of expected / measured over a grid), and the errors of all rows by them.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import yaml

from grpo_mp.config import check_settings
from grpo_mp.planner.clusters import Efficiency, read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import make_plan

PUBLISHED = Path(__file__).with_name("published_steps.yaml")
STEP = "step"
COLUMNS = ("recipe", "time of", "measured s", "expected s", "error")
MATMUL = [0.05 * number for number in range(4, 11)]
DEVICE_MEMORY = [0.05 * number for number in range(6, 19)]
# Settings that no measurement depends on.
ANY_RUN: dict[str, Any] = {
    "run": {"folder": "runs/measured", "steps": 1, "save_every": 0},
    "data": {"train": "train.jsonl"},
    "reward": {"answer": 1.0},
    "optimizer": {"lr": 1e-6},
}


@dataclass(frozen=True)
class PublishedStep:
    """A recipe on its machines, and seconds by phase; `step` for all of them."""

    name: str
    fitted: bool
    job: PlannedJob
    measured: Mapping[str, float]

    def expected_s(self, phase: str, rates: Efficiency | None = None) -> float:
        """Return the expected seconds of a phase, or of a step with its weight sync and without the check after it."""
        cluster = replace(self.job.cluster, achievable=rates or self.job.cluster.achievable)
        plan = make_plan(replace(self.job, cluster=cluster))
        if phase != STEP:
            return sum(plan.times[SubPhase(phase)].values())
        return plan.step_s - plan.seconds(SubPhase.CHECK)

    def log_error(self, rates: Efficiency) -> float:
        """Return the logarithm of expected over measured seconds of the step, or of the one phase that is known."""
        phase = STEP if STEP in self.measured else next(iter(self.measured))
        return log(self.expected_s(phase, rates) / self.measured[phase])


def read_steps(file: Path = PUBLISHED) -> list[PublishedStep]:
    return [
        PublishedStep(entry["name"], entry["fitted"], read_recipe(entry), entry["measured"])
        for entry in yaml.safe_load(file.read_text(encoding="utf-8"))
    ]


def read_recipe(entry: Mapping[str, Any]) -> PlannedJob:
    given = entry["settings"]
    settings = check_settings(given | {name: part | given.get(name, {}) for name, part in ANY_RUN.items()}, "a recipe")
    hf, _ = find_config(settings.model.path)
    return make_job(settings, hf, read_cluster(entry["cluster"]), entry["nodes"], None, entry["response_tokens"])


def rows_of(steps: list[PublishedStep]) -> list[tuple[str, ...]]:
    rows = []
    for step in steps:
        for phase, measured_s in step.measured.items():
            expected_s = step.expected_s(phase)
            error = f"{expected_s / measured_s - 1:+.0%}"
            rows.append((step.name, phase, f"{measured_s:,.0f}", f"{expected_s:,.0f}", error))
    return rows


def fit(steps: list[PublishedStep], link: float) -> Efficiency:
    candidates = [Efficiency(matmul, memory, link) for matmul, memory in product(MATMUL, DEVICE_MEMORY)]
    return min(candidates, key=lambda rates: sum(step.log_error(rates) ** 2 for step in steps))


def show_fit(steps: list[PublishedStep]) -> None:
    for name in sorted({step.job.cluster.name for step in steps if step.fitted}):
        rows = [step for step in steps if step.job.cluster.name == name]
        shipped = rows[0].job.cluster.achievable
        fitted = fit([step for step in rows if step.fitted], shipped.link)
        print(f"{name}: fitted {fitted}; the profile has {shipped}")
        for role in (True, False):
            part = [step for step in rows if step.fitted == role]
            for rates, word in ((fitted, "fitted"), (shipped, "profile")):
                errors = [step.log_error(rates) for step in part]
                shown = ", ".join(
                    f"{step.name} {exp(error) - 1:+.0%}" for step, error in zip(part, errors, strict=True)
                )
                typical = exp(sqrt(sum(error**2 for error in errors) / len(errors)))
                print(f"  {'fitted on' if role else 'checked by'}, {word} rates: {shown}; typically x{typical:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    steps = read_steps()
    if parser.parse_args().fit:
        show_fit(steps)
        return
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows_of(steps)):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
