"""The schedules of the recipes of 671 billion parameters, for the page of the planner."""

from collections.abc import Iterator
from pathlib import Path

from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import make_plan
from grpo_mp.simulation.planned import Assumptions, on_gpus, simulate_job
from grpo_mp.simulation.scenario import Outcome

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = (("moe_671b_64x141.yaml", "h200-141", 8),)  # with nodes of the cluster
GPUS = (128, 1024)
OVERRIDES = ["engine.concurrent_groups=512"]  # so that a free place is left for groups of later steps
STEPS = 24


def simulate_recipes() -> Iterator[Outcome]:
    """Simulate each schedule, with its lengths as the planner assumes them."""
    for file, cluster, nodes in RECIPES:
        settings = load_settings(CONFIGS / file, OVERRIDES)
        job = make_job(settings, find_config(settings.model.path)[0], read_cluster(cluster), nodes)
        sync_s = make_plan(job).sync_s
        for gpus in GPUS:
            yield from simulate_job(on_gpus(job, gpus), sync_s, Assumptions(steps=STEPS))
