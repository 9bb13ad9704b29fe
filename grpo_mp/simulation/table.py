"""Simulated runs as rows of a table."""

from collections.abc import Iterable, Sequence

from grpo_mp.simulation.scenario import Outcome

COLUMNS = (
    "schedule",
    "max staleness",
    "GPUs",
    "of engines",
    "step s",
    "samples/s",
    "idle",
    "staleness mean, max",
    "lost tokens a step",
    "useful",
    "bound s",
    "of bound",
)

NEAR_BOUND = 0.9  # share of the speed without bubbles


def least_bounds(outcomes: Iterable[Outcome]) -> dict[int, float]:
    """Return the seconds of a step without bubbles by number of GPUs: of the run that has the least."""
    bounds: dict[int, float] = {}
    for scenario in (outcome.scenario for outcome in outcomes):
        bounds[scenario.gpus] = min(scenario.bound_s, bounds.get(scenario.gpus, scenario.bound_s))
    return bounds


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return the cells of each run; all runs on as many GPUs have one bound."""
    bounds = least_bounds(outcomes)
    return [_row_of(outcome, bounds[outcome.scenario.gpus]) for outcome in outcomes]


def _row_of(outcome: Outcome, bound_s: float) -> tuple[str, ...]:
    scenario = outcome.scenario
    return (
        str(scenario.schedule),
        str(scenario.max_staleness),
        f"{scenario.gpus:,}",
        "all" if scenario.colocated else f"{scenario.engine_gpus:,}",
        f"{outcome.step_s:,.1f}",
        f"{outcome.samples_per_s:,.2f}",
        f"{outcome.idle_share:.0%}",
        f"{outcome.mean_staleness:.2f}, {max(outcome.staleness)}",
        f"{outcome.lost_tokens:,.0f}",
        f"{outcome.useful_share:.1%}",
        f"{bound_s:,.1f}",
        f"{bound_s / outcome.step_s:.0%}",
    )


def describe_best(outcomes: Sequence[Outcome]) -> str:
    """Return sentences for each number of GPUs: the schedule that trains most samples, and those near the bound."""
    sentences = []
    for gpus in dict.fromkeys(outcome.scenario.gpus for outcome in outcomes):
        alike = [outcome for outcome in outcomes if outcome.scenario.gpus == gpus]
        best, plain = max(alike, key=lambda outcome: outcome.samples_per_s), alike[0]
        sentences.append(
            f"{gpus:,} GPUs: {best.scenario.schedule} with max_staleness {best.scenario.max_staleness} is fastest, "
            f"{best.samples_per_s / plain.samples_per_s:.2f} times {plain.scenario.schedule} with "
            f"{plain.scenario.max_staleness}; samples by age in versions: {describe_staleness(best)}. "
            f"{NEAR_BOUND:.0%} of the bound: {_describe_near_bound(alike)}."
        )
    return "\n".join(sentences)


def _describe_near_bound(outcomes: Sequence[Outcome]) -> str:
    """Return the schedules that reach it, each with its lowest staleness."""
    bound_s = min(outcome.scenario.bound_s for outcome in outcomes)
    near = [outcome.scenario for outcome in outcomes if bound_s / outcome.step_s >= NEAR_BOUND]
    lowest = {scenario.schedule: scenario for scenario in sorted(near, key=lambda one: -one.max_staleness)}
    return ", ".join(f"{name} from {one.max_staleness} on" for name, one in sorted(lowest.items())) or "none"


def describe_staleness(outcome: Outcome) -> str:
    """Return the shares of trained samples by age, in words."""
    total = outcome.staleness.total()
    return ", ".join(f"{age}: {count / total:.0%}" for age, count in sorted(outcome.staleness.items()))
