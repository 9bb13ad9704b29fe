"""The schedules of the recipes of 671 billion parameters, for the page of the planner."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import make_plan
from grpo_mp.simulation.planned import Assumptions, on_gpus, simulate_job
from grpo_mp.simulation.planned_failures import (
    COLUMNS,
    HOUR_S,
    FailureAssumptions,
    failure_costs,
    row_of,
    without_failures,
)
from grpo_mp.simulation.scenario import Outcome, Schedule

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 16  # at least


@dataclass(frozen=True)
class Recipe:
    """A settings file on nodes of a cluster, played on each number of GPUs."""

    file: str
    cluster: str
    nodes: int
    gpus: tuple[int, ...]


ON_80_GB = Recipe("moe_671b.yaml", "h100-80", 16, (128,))
ON_141_GB = Recipe("deepseek_r1_64x_h200.yaml", "h200-141", 8, (128, 1024))
# 419 unexpected interruptions in 54 days of 16,384 GPUs (arXiv 2407.21783, table 5): 262 of GPUs and their memory,
# 42 of switches, cables and network cards, and 115 others.
PUBLISHED_RATES = FailureAssumptions(81_000, 23_000, 63_000, spares=2)
RARE_GPUS, OFTEN_GPUS, STEPS_PER_FAILURE = (128, 1024), 256, 10
FAILURE_COLUMNS = ("GPUs", "a failure every", "step s", *COLUMNS)


def plan_recipe(recipe: Recipe) -> PlannedJob:
    """Return the planned job of a recipe."""
    settings = load_settings(CONFIGS / recipe.file, [])
    return make_job(settings, find_config(settings.model.path)[0], read_cluster(recipe.cluster), recipe.nodes)


def simulate_recipe(recipe: Recipe) -> Iterator[Outcome]:
    """Simulate each schedule, with its lengths as the planner assumes them."""
    job = plan_recipe(recipe)
    sync_s = make_plan(job).sync_s
    for gpus in recipe.gpus:
        yield from simulate_job(on_gpus(job, gpus), sync_s, Assumptions(steps=STEPS))


def failures_of_recipe(recipe: Recipe) -> Iterator[tuple[str, ...]]:
    """Yield rows of what failures cost: at published rates, and where a process dies in one of ten steps."""
    for gpus in RARE_GPUS:
        yield from _failure_rows(recipe, gpus, PUBLISHED_RATES)
    yield from _failure_rows(recipe, OFTEN_GPUS, None)


def _failure_rows(recipe: Recipe, gpus: int, assumed: FailureAssumptions | None) -> Iterator[tuple[str, ...]]:
    job = on_gpus(plan_recipe(recipe), gpus)
    plan = make_plan(job)
    (outcome,) = simulate_job(job, plan.sync_s, Assumptions(steps=STEPS), [Schedule.COLOCATED], [0])
    step_s = without_failures(outcome).step_s
    dying = STEPS_PER_FAILURE * step_s * gpus / HOUR_S
    rates = assumed or FailureAssumptions(gpu_mtbf_h=dying, gpu_repaired=0.0)  # a process of the GPU, which is well
    every_s = 1 / sum(1 / mean_s for mean_s in rates.mtbf_s(gpus, gpus // job.gpus_per_node).values())
    costs, slower = failure_costs(plan, outcome, rates)
    best = max(costs, key=lambda cost: cost.effective_share)
    for cost in costs:
        if cost in (best, costs[0]) or cost.job.save_every == job.settings.run.save_every:
            yield f"{gpus:,}", f"{every_s / step_s:,.0f} steps", f"{step_s:,.0f}", *row_of(cost, slower)
