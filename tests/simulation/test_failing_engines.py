"""What failures of engines cost, rare or frequent, against formulas and against every step played."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from grpo_mp.planner.plan import make_plan
from grpo_mp.simulation.failing_engines import simulate_with_failures, with_engine_failures
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.planned import Assumptions, simulate_job
from grpo_mp.simulation.planned_failures import HOUR_S, FailureAssumptions, failure_costs
from grpo_mp.simulation.scenario import Outcome, Rates, Schedule
from tests.planner.jobs import job_of
from tests.simulation.scenarios import scenario_of

STEP_S, RESTART_S = 115.0, 20.0
# One engine that generates for 100 s, trains for 10 and gets weights in 5. Lost while it generates, it begins all of it
# anew, 5 s for weights after its restart; lost later, it gets weights of its own after all the others did, at 15 s.
COST_S = (100 * (RESTART_S + 5 + 100 / 2) + 15 * (15 / 2 + RESTART_S + 5 - 15)) / STEP_S


def alike(**changes: Any) -> Outcome:
    rates = Rates(decode_step_s=1.0, train_token_s=0.0, update_s=10.0, sync_s=5.0)
    values = {"rates": rates, "lengths": (100,), "prompt_tokens": 0, "engines": 1, "slots": 32}
    return simulate(scenario_of(**(values | {"engine_restart_s": RESTART_S} | changes)))


def lost_share(failing: Outcome, quiet: Outcome) -> float:
    return 1 - quiet.step_s / failing.step_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mtbf_s", [2e4, 1e6, 1e10])
def test_rare_failures_cost_their_rate_times_what_one_costs(mtbf_s: float, seed: int) -> None:
    """With one in 170 to 10^8 steps: the 16 that a run has at first have none."""
    quiet = alike(seed=seed)
    assert quiet.step_s == pytest.approx(STEP_S)
    failing = with_engine_failures(quiet, mtbf_s)
    assert lost_share(failing, quiet) == pytest.approx(COST_S / mtbf_s, rel=0.04)
    assert failing.after.failures * mtbf_s == pytest.approx(failing.step_s, rel=0.05)


@pytest.mark.parametrize("engines", [1, 4])
def test_engines_fail_independently(engines: int) -> None:
    """Twice as many fail twice as often; of each, the groups of all wait for it to start: it costs no more."""
    shares = []
    for count in (engines, 2 * engines):
        quiet = alike(engines=count, slots=64, concurrent_groups=64, prompts_per_step=count)
        shares.append(lost_share(with_engine_failures(quiet, 1e7), quiet))
    assert shares[1] == pytest.approx(2 * shares[0], rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "staleness", "steps_between", "restart_steps"),
    [
        (Schedule.COLOCATED, 0, 3, 1.0),
        (Schedule.COLOCATED, 2, 8, 0.5),
        (Schedule.ONE_STEP_OFF, 1, 8, 1.0),
        (Schedule.ASYNC, 1, 8, 1.0),
        (Schedule.ASYNC, 2, 3, 1.0),
    ],
)
def test_skipped_steps_are_as_those_that_are_played(
    schedule: Schedule, staleness: int, steps_between: int, restart_steps: float
) -> None:
    quiet = simulate(scenario_of(schedule, max_staleness=staleness, steps=64))
    restart_s, mtbf_s = restart_steps * quiet.step_s, 2 * steps_between * quiet.step_s
    long = replace(quiet.scenario, engine_restart_s=restart_s, steps=150 * steps_between, seed=7)
    played, alone = simulate(replace(long, engine_mtbf_s=mtbf_s)), simulate(long)
    share = 1 - alone.after.now / played.after.now
    fast, lost_tokens = [], []
    for seed in range(3):
        scenario = replace(quiet.scenario, engine_restart_s=restart_s, seed=seed)
        failing = with_engine_failures(simulate(scenario), mtbf_s)
        fast.append(lost_share(failing, simulate(scenario)))
        lost_tokens.append(failing.lost_tokens)
    assert fmean(fast) == pytest.approx(share, rel=0.1)
    assert fmean(lost_tokens) == pytest.approx(played.after.tokens["lost"] / long.steps, rel=0.4)
    assert max(fast) < 1.25 * min(fast)


def test_without_failures_a_run_is_the_settled_one() -> None:
    outcome = simulate_with_failures(scenario_of())
    assert outcome is with_engine_failures(outcome, 0.0)
    assert len(outcome.ends) > 2


def test_a_planned_job_waits_for_hosts_as_long_whether_engines_fail_or_not() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 2, rollout={"prompts_per_step": 16})
    assumed = FailureAssumptions(gpu_mtbf_h=2_000.0, host_mtbf_h=3_000.0)
    rows = []
    for hours in (0.0, 200.0):
        assumptions = Assumptions(steps=4, engine_mtbf_s=hours * HOUR_S, engine_restart_s=3600.0)
        (outcome,) = simulate_job(job, 1.0, assumptions, [Schedule.COLOCATED], [0])
        costs, slower = failure_costs(make_plan(job, with_sync=False), outcome, assumed)
        assert (slower > 1.02) == bool(hours)
        rows.append(costs[0])
    alone, with_engines = (cost.lost["waiting for a host"] / cost.total_s for cost in rows)
    assert with_engines == pytest.approx(alone, rel=0.03)
    hours = 1 / (16 / 2_000 + 2 / 3_000)
    for cost in rows:
        assert cost.total_s / cost.failures.total() == pytest.approx(hours * HOUR_S, rel=0.03)
