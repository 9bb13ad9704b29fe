"""The scenarios of a planned job: sizes from its settings, rates from the planner's model of time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from grpo_mp.distributed.layout import layout_violations, sets_pipeline_layout
from grpo_mp.planner.engine_memory import EngineMemory
from grpo_mp.planner.generation import DecodeWork, decode_use, prefill_flops, running_limit
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import Plan, check_fits, make_plan
from grpo_mp.planner.resource_use import ResourceUse, estimate_time
from grpo_mp.planner.speculation import speculation
from grpo_mp.simulation.failing_engines import simulate_with_failures
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.scenario import Outcome, Rates, Scenario, Schedule
from grpo_mp.utils.errors import UserError

SPLITS = 8  # the engines' share of the GPUs is tried in so many parts
SIMULATED_SPLITS = 3  # those with the lowest bounds
DECK_STEPS = 8  # steps that are dealt from the same lengths: each has others
MANY = 10**6  # sequences, that use every expert


@dataclass(frozen=True)
class Assumptions:
    """What no setting says. `lengths`: of responses; empty: those that the planner assumes."""

    lengths: tuple[int, ...] = ()
    drop_rate: float = 0.0
    draft_tokens: int | None = None  # by one layer; None: engine.speculative's
    engine_mtbf_s: float = 0.0
    engine_restart_s: float = 300.0
    steps: int = 16
    seed: int = 0


def simulate_job(
    job: PlannedJob,
    sync_s: float,
    assumed: Assumptions,
    schedules: Iterable[Schedule] = tuple(Schedule),
    stalenesses: Iterable[int] = (0, 1, 2, 4),
    engine_gpus: int | None = None,
) -> list[Outcome]:
    """Simulate a job under each schedule and bound of staleness; those that need GPUs of their own divide them best.

    `job`: a colocated one, see `on_gpus`. `sync_s`: seconds of a weight sync. `engine_gpus`: only this division. A
    schedule that has none is left out.
    """
    outcomes, stalenesses = [], tuple(stalenesses)
    for schedule in schedules:
        plans = list(_plans(job, schedule, engine_gpus))
        for staleness in possible_stalenesses(schedule, stalenesses):
            candidates = [_with_deck(scenario_of(plan, sync_s, staleness, assumed)) for plan in plans]
            candidates.sort(key=lambda scenario: scenario.bound_s)
            # few steps: whether an engine fails in those of one division is chance
            simulated = [
                (simulate(replace(scenario, engine_mtbf_s=0.0)).step_s, scenario)
                for scenario in candidates[:SIMULATED_SPLITS]
            ]
            for _, fastest in sorted(simulated, key=lambda item: item[0])[:1]:
                outcomes.append(simulate_with_failures(fastest))
    return outcomes


def _with_deck(scenario: Scenario) -> Scenario:
    """Return the scenario with the lengths of many steps, so that they are not the same in each."""
    times = -(-DECK_STEPS * scenario.samples_per_step // len(scenario.lengths))
    return replace(scenario, lengths=scenario.lengths * times)


def possible_stalenesses(schedule: Schedule, stalenesses: Iterable[int]) -> list[int]:
    """Return the bounds of staleness that a schedule can have."""
    if schedule is Schedule.ONE_STEP_OFF:
        return [staleness for staleness in stalenesses if staleness == 1]
    return [staleness for staleness in stalenesses if staleness or schedule is Schedule.COLOCATED]


def _plans(job: PlannedJob, schedule: Schedule, engine_gpus: int | None) -> Iterator[Plan]:
    """Yield the plan of a colocated job, or those of all divisions of its GPUs in which layout and memory suffice."""
    if schedule is Schedule.COLOCATED:
        if _violation(job) is None:
            yield make_plan(job, with_sync=False)
        return
    size = job.settings.engine.gpus_per_engine
    shares = {round(job.world_size * part / SPLITS / size) * size for part in range(1, SPLITS)}
    for share in sorted(shares - {0, job.world_size}) if engine_gpus is None else [engine_gpus]:
        divided = put_on(job, job.world_size, schedule, share)
        if _violation(divided) is None:
            plan = make_plan(divided, with_sync=False)
            feasibility = check_fits(plan)
            if feasibility.device.fits and feasibility.host.fits:
                yield plan


def on_gpus(job: PlannedJob, gpus: int) -> PlannedJob:
    """Put a job on so many GPUs: with more engines and data-parallel ranks, and the same samples in a step.

    Raises UserError where engines do not divide them, or the layout of a colocated job does not.
    """
    moved, layout = put_on(job, gpus), job.settings.layout
    violation = _violation(moved) if job.settings.shares_devices else None
    if violation or gpus % job.settings.engine.gpus_per_engine:
        engine = f"{gpus} GPUs are no multiple of engine.gpus_per_engine={job.settings.engine.gpus_per_engine}"
        raise UserError(f"--gpus {gpus}: {violation or engine} ({layout.model_dump(exclude_none=True)})")
    return moved


def _violation(job: PlannedJob) -> str | None:
    uneven = sets_pipeline_layout(job.settings.training.megatron_args)
    updates = job.settings.samples_per_step // job.settings.training.updates_per_step
    violation = next(layout_violations(job.settings.layout, job.model, job.train_ranks, uneven_pipeline=uneven), None)
    few = f"{job.dp_size} data-parallel ranks share {updates} samples of an update" if violation is None else ""
    return violation or (few if few and updates < job.dp_size else None)


def put_on(job: PlannedJob, gpus: int, schedule: Schedule = Schedule.COLOCATED, engine_gpus: int = 0) -> PlannedJob:
    """Put a job on so many GPUs, of which engines have the last `engine_gpus`, whether its layout divides them or not.

    With 0 engines and trainer share all of them.
    """
    per_node = gcd(gpus, job.gpus_per_node)
    engines = max(1, (engine_gpus or gpus) // job.settings.engine.gpus_per_engine)
    engine = job.settings.engine.model_copy(update={"num_engines": engines, "ranks": engine_gpus})
    settings = job.settings.model_copy(update={"schedule": schedule.value, "engine": engine})
    return replace(job, settings=settings, nodes=gpus // per_node, gpus_per_node=per_node)


def scenario_of(plan: Plan, sync_s: float, max_staleness: float, assumed: Assumptions) -> Scenario:
    """Return the scenario of a planned job."""
    job, settings, engine = plan.job, plan.job.settings, plan.memory.engine
    engine_gpus = settings.engine.ranks or job.world_size
    drafts = speculation(job, assumed.draft_tokens)
    rates = replace(planned_rates(plan), sync_s=sync_s).speculating(drafts.verified_tokens, drafts.drafting)
    rule = settings.algorithm.filter
    return Scenario(
        schedule=Schedule(settings.schedule),
        rates=rates,
        lengths=assumed.lengths or job.responses(settings.samples_per_step),
        engines=engine_gpus // settings.engine.gpus_per_engine,
        engine_gpus=engine_gpus,
        trainer_gpus=job.train_ranks,
        slots=int(running_limit(job, engine)),
        concurrent_groups=settings.engine.concurrent_groups,
        recompute_cache=settings.sync.pause == "retract",
        prompts_per_step=settings.rollout.prompts_per_step,
        group_size=settings.rollout.group_size,
        prompt_tokens=job.prompt_tokens,
        max_staleness=max_staleness,
        oversample_factor=1.0 if max_staleness else rule.oversample_factor,
        select_by="launch" if max_staleness else rule.select_by,
        drop_rate=assumed.drop_rate,
        acceptance_length=drafts.acceptance_length,
        engine_mtbf_s=assumed.engine_mtbf_s,
        engine_restart_s=assumed.engine_restart_s,
        steps=assumed.steps,
        seed=assumed.seed,
    )


def planned_rates(plan: Plan) -> Rates:
    """Return the rates of a plan without speculation; its weight sync takes no time where it was not planned."""
    job, engine, settings = plan.job, plan.memory.engine, plan.job.settings
    step_s = _decode_s(job, engine, DecodeWork(1, (0,), 0, 0))
    expected = {sub_phase: plan.times[sub_phase].expected_s for sub_phase in SubPhase}
    tokens = settings.samples_per_step * job.mean_seq_len
    experts = job.model.num_experts
    return Rates(
        decode_step_s=step_s,
        train_token_s=(expected[SubPhase.LOGPROB] + expected[SubPhase.TRAIN]) / tokens,
        sequence_s=_decode_s(job, engine, DecodeWork(0, (MANY,), 1, 0)),
        cached_token_s=_decode_s(job, engine, DecodeWork(0, (MANY,), 0, 1)),
        experts_s=_decode_s(job, engine, DecodeWork(1, (MANY,), 0, 0)) - step_s,
        unused_expert=1 - job.model.experts_per_token / experts if experts else 0.0,
        prefill_token_s=estimate_time(
            ResourceUse(flops=prefill_flops(job, 1), fp8=job.engine_uses_fp8), job.cluster
        ).expected_s,
        update_s=expected[SubPhase.OPTIMIZER] + expected[SubPhase.SCORE],
        sync_s=plan.sync_s,
        switch_s=expected[SubPhase.OFFLOAD],
        save_s=expected[SubPhase.SAVE] * plan.times_per_step(SubPhase.SAVE),
    )


def _decode_s(job: PlannedJob, engine: EngineMemory, work: DecodeWork) -> float:
    return estimate_time(decode_use(job, engine, work), job.cluster).expected_s
