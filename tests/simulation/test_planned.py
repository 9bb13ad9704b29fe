"""Scenarios of planned jobs: the simulation's rates are the planner's, so its steps are, too."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import make_plan
from grpo_mp.simulation.lengths import lognormal_lengths, read_lengths
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.planned import Assumptions, on_gpus, scenario_of, simulate_job
from grpo_mp.simulation.recipes import ON_80_GB, ON_141_GB, Recipe, plan_recipe
from grpo_mp.simulation.scenario import Schedule
from grpo_mp.utils.errors import UserError
from tests.planner.jobs import job_of
from tests.simulation.scenarios import RATES

CONFIGS = Path(__file__).parents[2] / "configs"


@lru_cache
def recipe(name: str, cluster: str, nodes: int, response_tokens: int | None = None) -> PlannedJob:
    settings = load_settings(CONFIGS / name, ["run.save_every=0"])
    hf = find_config(settings.model.path)[0]
    return make_job(settings, hf, read_cluster(cluster), nodes, None, response_tokens)


@pytest.mark.parametrize(
    ("name", "nodes", "response_tokens"),
    [("moe_671b.yaml", 16, None), ("moe_671b.yaml", 16, 32768), ("qwen3_30b_a3b.yaml", 2, 32768)],
)
def test_colocated_takes_the_plans_own_time(name: str, nodes: int, response_tokens: int | None) -> None:
    job = recipe(name, "h100-80", nodes, response_tokens)
    job = replace(job, mean_response_tokens=min(job.mean_response_tokens, job.settings.rollout.max_response_tokens))
    plan = make_plan(job, with_sync=False)
    scenario = scenario_of(plan, 0.0, 0, Assumptions(steps=2))
    alike = len(set(scenario.lengths)) == 1
    assert simulate(scenario).step_s == pytest.approx(plan.step_s, rel=1e-3 if alike else 0.02)


def test_engines_take_whole_engines_and_the_layout_divides_the_rest() -> None:
    outcomes = simulate_job(on_gpus(recipe("qwen3_30b_a3b.yaml", "h100-80", 2), 64), 3.0, Assumptions(steps=2))
    assert [(outcome.scenario.schedule, outcome.scenario.max_staleness) for outcome in outcomes] == [
        *((Schedule.COLOCATED, staleness) for staleness in (0, 1, 2, 4)),
        (Schedule.ONE_STEP_OFF, 1),
        *((Schedule.ASYNC, staleness) for staleness in (1, 2, 4)),
    ]
    for outcome in outcomes:
        scenario = outcome.scenario
        assert scenario.gpus == 64
        assert scenario.rates.sync_s == 3.0
        assert scenario.engine_gpus % scenario.engines == 0


def test_a_steps_time_does_not_follow_from_how_many_are_played() -> None:
    """The groups of this schedule come in cycles of three steps, of which a window may hold a part."""
    job = recipe("moe_671b.yaml", "h100-80", 16)
    outcomes = [
        outcome
        for steps, seed in ((16, 0), (20, 0), (24, 0), (16, 1))
        for outcome in simulate_job(job, 1.0, Assumptions(steps=steps, seed=seed), [Schedule.COLOCATED], [2])
    ]
    times = [outcome.step_s for outcome in outcomes]
    assert max(times) < 1.015 * min(times)
    assert len(set(times)) == 4  # the seed decides the order of the lengths


def test_no_layout_divides_what_it_needs_whole() -> None:
    """128 GPUs are one engine, and one replica of the policy."""
    job = recipe("moe_671b.yaml", "h100-80", 16)
    schedules = {outcome.scenario.schedule for outcome in simulate_job(job, 1.0, Assumptions(steps=2))}
    assert schedules == {Schedule.COLOCATED}


def test_other_numbers_of_gpus_need_whole_engines_and_layouts() -> None:
    job = recipe("moe_671b.yaml", "h100-80", 16)
    assert on_gpus(job, 1024).num_engines == 8
    with pytest.raises(UserError, match="--gpus 192"):
        on_gpus(job, 192)


def test_a_division_may_be_given() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 2)
    outcomes = simulate_job(job, 1.0, Assumptions(steps=2), [Schedule.ASYNC], [1], engine_gpus=4)
    assert [(outcome.scenario.engine_gpus, outcome.scenario.trainer_gpus) for outcome in outcomes] == [(4, 12)]


def test_speculation_verifies_more_tokens_in_a_step() -> None:
    rates = RATES.speculating(verified=4, drafting=1.3)
    assert rates.decode_s(8, 0) == pytest.approx(
        1.3 * (RATES.decode_step_s + 4 * 8 * RATES.sequence_s + RATES.experts_s * (1 - RATES.unused_expert**32))
    )


def test_lengths_are_read_as_numbers_and_as_samples(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text('12\n\n{"tokens": 34, "response": "x"}\n')
    assert read_lengths(file) == (12, 34)
    for text, words in (
        ("", "is empty"),
        ("3\nlong\n", r"lengths:2: long"),
        ("0\n", "no number"),
        ("true\n", "no number"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            read_lengths(file)
    with pytest.raises(UserError, match="no such file"):
        read_lengths(tmp_path / "none")


def test_a_lognormal_has_its_mean_and_a_longer_tail_with_more_sigma() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 1)
    narrow, wide = (lognormal_lengths(job, sigma) for sigma in (0.2, 1.2))
    assert sum(narrow) / len(narrow) == pytest.approx(job.mean_response_tokens, rel=0.01)
    assert sum(wide) / len(wide) == pytest.approx(job.mean_response_tokens, rel=0.01)
    assert max(narrow) < max(wide) == job.settings.rollout.max_response_tokens


@pytest.mark.parametrize("recipe", [ON_80_GB, ON_141_GB], ids=lambda recipe: recipe.cluster)
def test_a_recipe_on_its_own_gpus_reaches_nine_tenths_of_the_bound_at_its_own_staleness(recipe: Recipe) -> None:
    job = plan_recipe(recipe)
    staleness = job.settings.rollout.max_staleness
    assert staleness > 0
    outcomes = simulate_job(job, make_plan(job).sync_s, Assumptions(), [Schedule.COLOCATED])
    bound_s = min(outcome.scenario.bound_s for outcome in outcomes)
    shares = {outcome.scenario.max_staleness: bound_s / outcome.step_s for outcome in outcomes}
    assert shares[0] < 0.85
    assert shares[staleness] > 0.9
