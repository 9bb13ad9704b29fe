"""Simulate a planned job and print what its schedules reach."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

from rich.console import Console

from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.plan import make_plan
from grpo_mp.planner.show import table_of
from grpo_mp.simulation.lengths import lognormal_lengths
from grpo_mp.simulation.planned import Assumptions, on_gpus, possible_stalenesses, simulate_job
from grpo_mp.simulation.planned_failures import COLUMNS as FAILURE_COLUMNS
from grpo_mp.simulation.planned_failures import FailureAssumptions, failure_costs
from grpo_mp.simulation.planned_failures import describe_best as describe_saves
from grpo_mp.simulation.planned_failures import row_of as failure_row
from grpo_mp.simulation.scenario import Outcome, Schedule
from grpo_mp.simulation.table import COLUMNS, describe_best, rows_of
from grpo_mp.utils.errors import UserError


def simulate_and_show(job: PlannedJob, lengths: Sequence[int], args: Namespace, console: Console) -> int:
    """Print a table for each number of GPUs, the staleness of each run, and the fastest one; return the exit status."""
    assumed = Assumptions(
        tuple(lengths) or (lognormal_lengths(job, args.response_sigma) if args.response_sigma else ()),
        args.drop_rate,
        args.draft_tokens,
        args.engine_mtbf_hours * 3600,
        args.engine_restart_s,
        args.steps,
        args.seed,
    )
    if tokens := job.settings.rollout.tokens_ahead:
        console.print(
            f"left out: rollout.tokens_ahead={tokens}: here free places begin groups of later steps and no step waits "
            "for their tokens: colocated with a staleness of 1 or more, and async with 2 or more, are simulated faster "
            "than they are"
        )
    schedules = list(_possible_schedules(args, console))
    outcomes = list(_simulate(job, assumed, schedules, args, console))
    if not outcomes:
        raise UserError("--simulate: no schedule is possible: name numbers of GPUs that layout and engines divide")
    console.print(table_of("A step of each schedule, simulated", COLUMNS, rows_of(outcomes)))
    console.print(describe_best(outcomes))
    failures = FailureAssumptions(
        args.gpu_mtbf_hours,
        args.host_mtbf_hours,
        args.network_mtbf_hours,
        args.restart_s,
        args.spares,
        args.repair_hours,
        args.gpu_repaired,
        args.seed,
    )
    if failures.any:
        for gpus in dict.fromkeys(outcome.scenario.gpus for outcome in outcomes):
            alike = [outcome for outcome in outcomes if outcome.scenario.gpus == gpus]
            _show_failures(on_gpus(job, gpus), max(alike, key=lambda one: one.samples_per_s), failures, console)
    return 0


def _show_failures(job: PlannedJob, outcome: Outcome, failures: FailureAssumptions, console: Console) -> None:
    """Print what failures cost the fastest schedule."""
    scenario = outcome.scenario
    costs, slower = failure_costs(make_plan(job, with_sync=False), outcome, failures)
    title = f"Failures on {scenario.gpus:,} GPUs, {scenario.schedule} with max_staleness {scenario.max_staleness}"
    console.print(table_of(title, FAILURE_COLUMNS, [failure_row(cost, slower) for cost in costs]))
    console.print(describe_saves(costs, slower))


def _possible_schedules(args: Namespace, console: Console) -> Iterator[Schedule]:
    """Yield the schedules that may have one of the given bounds of staleness, and print what is left out.

    Raises UserError where the only one is.
    """
    for schedule in [Schedule(args.schedule)] if args.schedule else Schedule:
        if possible_stalenesses(schedule, args.staleness):
            yield schedule
            continue
        needs = "staleness 1" if schedule is Schedule.ONE_STEP_OFF else "a staleness of 1 or more"
        given = ",".join(map(str, args.staleness))
        if args.schedule:
            raise UserError(f"--staleness {given}: {schedule} needs {needs}: add it")
        console.print(f"left out: {schedule} with --staleness {given}: it needs {needs}")


def _simulate(
    job: PlannedJob, assumed: Assumptions, schedules: Sequence[Schedule], args: Namespace, console: Console
) -> Iterator[Outcome]:
    """Yield what each schedule reaches on each number of GPUs, and print what is left out."""
    sync_s = make_plan(job).sync_s
    for gpus in args.gpus or [job.world_size]:
        engine_gpus = args.engine_gpus or job.settings.engine.ranks * gpus // job.world_size or None
        try:
            moved = on_gpus(job, gpus)
        except UserError as error:
            console.print(f"left out: {error}")
            continue
        simulated = simulate_job(moved, sync_s, assumed, schedules, args.staleness, engine_gpus)
        left_out = {*schedules} - {outcome.scenario.schedule for outcome in simulated}
        if left_out:
            console.print(
                f"left out: --gpus {gpus} with {', '.join(sorted(left_out))}: no division leaves whole engines of "
                f"{job.settings.engine.gpus_per_engine} GPUs, and a trainer whose layout and memory suffice"
            )
        yield from simulated
