"""Speed-ups of schedules that others published, beside those that the simulation gives the same recipe."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.measured import MEASURED, read_measured, read_recipe
from grpo_mp.planner.plan import make_plan
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.planned import Assumptions, put_on, scenario_of
from grpo_mp.simulation.scenario import Rates, Scenario, Schedule
from grpo_mp.utils.reading import read_yaml

PUBLISHED = Path(__file__).with_name("published.yaml")
STEPS = 4
COLUMNS = ("recipe", "schedule", "GPUs", "colocated s", "measured s", "simulated s", "speed-up", "simulated", "error")


@dataclass(frozen=True)
class Comparison:
    """A schedule that somebody measured beside a colocated one: seconds of a step."""

    name: str
    scenario: Scenario
    colocated_s: float
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Return the relative error of the simulated speed-up."""
        return self.measured_s / self.simulated_s - 1

    @property
    def cells(self) -> tuple[str, ...]:
        """Return a row of the table."""
        scenario, over = self.scenario, self.scenario.oversample_factor
        divided = f"{scenario.engine_gpus} + {scenario.trainer_gpus}"
        schedule = f"{scenario.schedule} {scenario.max_staleness:g}" if over == 1 else f"over-sampling {over:g}"
        return (
            self.name,
            schedule,
            str(scenario.gpus) if scenario.colocated else divided,
            f"{self.colocated_s:,.0f}",
            f"{self.measured_s:,.0f}",
            f"{self.simulated_s:,.0f}",
            f"{self.colocated_s / self.measured_s:.2f}",
            f"{self.colocated_s / self.simulated_s:.2f}",
            f"{self.error:+.0%}",
        )


@dataclass(frozen=True)
class Scales:
    """Factors of the planner's rates that make the colocated step last as long as measured."""

    decode: float
    train: float
    rest_s: float

    def rates(self, rates: Rates) -> Rates:
        """Scale the rates."""
        decode = ("decode_step_s", "sequence_s", "cached_token_s", "experts_s", "prefill_token_s")
        return replace(
            rates,
            **{name: getattr(rates, name) * self.decode for name in decode},
            train_token_s=rates.train_token_s * self.train,
            update_s=rates.update_s * self.train,
            switch_s=self.rest_s,
        )


def read_comparisons(file: Path = PUBLISHED) -> Iterator[Comparison]:
    """Simulate each schedule of a file of published ones."""
    measured = {step.name: step.job for step in read_measured(MEASURED)}
    for entry in read_yaml(file):
        job = measured[entry["recipe"]] if "recipe" in entry else read_recipe(file, entry)
        scales = _fit(job, entry["baseline"])
        for other in entry["others"]:
            scenario = _other(job, other, scales)
            simulated_s, name = simulate(scenario).step_s, entry.get("recipe") or entry["name"]
            yield Comparison(name, scenario, entry["baseline"]["step"], other["step"], simulated_s)


def _fit(job: PlannedJob, baseline: Mapping[str, float]) -> Scales:
    plan = make_plan(job, with_sync=False)
    scenario = scenario_of(plan, 0.0, 0, Assumptions(steps=STEPS))
    scenario = replace(scenario, rates=replace(scenario.rates, switch_s=0.0))
    train_s = scenario.train_s(_tokens(job))
    generate_s = simulate(scenario).step_s - train_s
    if "train" not in baseline:
        factor = baseline["step"] / (generate_s + train_s)
        return Scales(factor, factor, 0.0)
    rest_s = baseline["step"] - baseline["generate"] - baseline["train"]
    return Scales(baseline["generate"] / generate_s, baseline["train"] / train_s, rest_s)


def _other(job: PlannedJob, other: Mapping[str, Any], scales: Scales) -> Scenario:
    schedule = Schedule(other["schedule"])
    engine_gpus = 0 if schedule is Schedule.COLOCATED else other["engine_gpus"]
    plan = make_plan(put_on(job, other["trainer_gpus"] + engine_gpus, schedule, engine_gpus), with_sync=False)
    scenario = scenario_of(plan, 0.0, other.get("max_staleness", 0), Assumptions(steps=STEPS))
    rates = scales.rates(scenario.rates)
    if "train" in other:
        rates = replace(rates, train_token_s=other["train"] / _tokens(job), update_s=0.0)
    return replace(
        scenario, rates=rates, oversample_factor=other.get("oversample_factor", 1.0), select_by=other["select_by"]
    )


def _tokens(job: PlannedJob) -> float:
    """Return the tokens of a step."""
    return job.settings.samples_per_step * job.mean_seq_len
