"""Simulate a planned job and print what its schedules reach."""

from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console

from grpo_mp.errors import UserError
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import make_plan
from grpo_mp.planner.show import table_of
from grpo_mp.simulation.lengths import lognormal_lengths
from grpo_mp.simulation.planned import Assumptions, on_gpus, simulate_job
from grpo_mp.simulation.scenario import Schedule
from grpo_mp.simulation.table import COLUMNS, describe_staleness, row_of


def simulate_and_show(job: PlannedJob, lengths: Sequence[int], args: Namespace, console: Console) -> int:
    """Print a table for each number of GPUs, the staleness of each run, and the fastest one; return the exit status."""
    assumed = Assumptions(
        tuple(lengths) or (lognormal_lengths(job, args.response_sigma) if args.response_sigma else ()),
        args.drop_rate,
        args.acceptance_length,
        args.draft_tokens,
        args.engine_mtbf_hours * 3600,
        args.engine_restart_s,
        args.steps,
        args.seed,
    )
    schedules = [Schedule(args.schedule)] if args.schedule else list(Schedule)
    sync_s = make_plan(job).times[SubPhase.SYNC].expected_s
    outcomes = []
    for gpus in args.gpus or [job.world_size]:
        own = job.settings.engine.ranks if gpus == job.world_size else 0
        engine_gpus = args.engine_gpus or own or None
        simulated = simulate_job(on_gpus(job, gpus), sync_s, assumed, schedules, args.staleness, engine_gpus)
        if not simulated:
            raise UserError(
                f"--gpus {gpus}: they cannot be divided into engines of {job.settings.engine.gpus_per_engine} GPUs and "
                "a trainer whose layout and memory suffice: take more of them, smaller engines, or schedule colocated"
            )
        left_out = {*schedules} - {outcome.scenario.schedule for outcome in simulated}
        if left_out:
            console.print(f"{gpus} GPUs: left out, since no division suffices: {', '.join(sorted(left_out))}")
        outcomes += simulated
    console.print(table_of("A step of each schedule, simulated", COLUMNS, map(row_of, outcomes)))
    best = max(outcomes, key=lambda outcome: outcome.samples_per_s / outcome.scenario.gpus)
    console.print(
        f"most samples of a GPU: {best.scenario.schedule} with max_staleness {best.scenario.max_staleness} on "
        f"{best.scenario.gpus} GPUs; samples by age in versions: {describe_staleness(best)}"
    )
    return 0
