"""Open a job on one rank: join the process groups, start the engine, build the policy; close everything at the end."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import ROLLOUTS, TrainState
from grpo_mp.config import Settings, dump_settings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.nccl_memory import NcclMemory, can_suspend
from grpo_mp.distributed.process_groups import WAITED_PHASES, Job, Parallel, broadcast, make_parallel
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.samples import SHOWN_SAMPLES
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.offload import device_items
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.reference import Reference
from grpo_mp.rollout.hosted_engine import START_TIMEOUT_S
from grpo_mp.rollout.rollout import Rollout, RolloutParts
from grpo_mp.trainer.collect import Collector, RolloutCollector
from grpo_mp.trainer.engine_check import MAX_PROMPTS, EngineCheck
from grpo_mp.trainer.evaluation import Evaluator
from grpo_mp.trainer.exit import PreemptionHandler
from grpo_mp.trainer.job import (
    FindCheckpoints,
    Resumed,
    RunContext,
    build_critic,
    build_policy,
    join_run,
    open_monitors,
    show_notes,
)
from grpo_mp.trainer.loop import PolicyContext
from grpo_mp.trainer.offload import INITIAL_RESIDENCY, offload_functions, start_engines_first
from grpo_mp.trainer.phase_manager import PhaseManager, explain_out_of_memory
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.trainer.recorded import RecordedGroups, read_recorded
from grpo_mp.trainer.recover import EngineRecovery
from grpo_mp.trainer.replay import ReplayCollector
from grpo_mp.trainer.save import CheckpointSaver
from grpo_mp.trainer.step_logger import sync_metrics
from grpo_mp.utils.phases import Phase
from grpo_mp.weight_sync.update import PolicyShards, WeightSync, build_weight_sync, largest_report

Models = tuple[Policy, Critic | None]


@dataclass(kw_only=True)
class RolloutContext(RunContext):
    """Parts of an RL job that every rank has, including ranks that only host an engine.

    `weight_sync` and `engine_check` are None in a replay, which has no engines.
    """

    settings: Settings
    inputs: RunInputs
    rollout: Rollout
    collector: Collector
    evaluator: Evaluator
    weight_sync: WeightSync | None
    engine_check: EngineCheck | None
    recovery: EngineRecovery

    def sync_weights(self) -> dict[str, float]:
        """Send the policy's weights to every engine, run the engine check, and return metrics; empty in a replay."""
        if not (self.weight_sync and self.engine_check):
            return {}
        with self.phases.phase(Phase.SYNC):
            self.state = broadcast(self.state, self.job.group)  # to ranks that only host an engine
            if not self.settings.updates_running_groups:
                self.collector.finish_generation()
            reports = self.recovery.update_weights(self.weight_sync, self.state.optimizer_step)
            self.collector.synced_step = self.state.step
        check = self.engine_check.run(self.state.optimizer_step)
        if not check.tokens and self.recovery.run():  # all engines were lost, and one has restarted
            check = self.engine_check.run(self.state.optimizer_step)
        return sync_metrics(largest_report(reports), check)

    @property
    def engines(self) -> "EngineContext":
        return EngineContext(self.job, self.rollout, phases=self.phases, progress=self.progress, recovery=self.recovery)


@dataclass(kw_only=True)
class TrainContext(RolloutContext, PolicyContext):
    """Context of a training rank in an RL job: adds policy, critic and checkpoint saver to `RolloutContext`."""


@dataclass(frozen=True)
class EngineContext:
    """Parts of a job that only generates, on one rank."""

    job: Job
    rollout: Rollout
    phases: PhaseManager
    progress: Progress
    recovery: EngineRecovery


@dataclass(frozen=True)
class RankRuntime:
    """Basic parts of every job on one rank; the process groups exist, the engines are placed but not started."""

    job: Job
    rollout: Rollout
    timeline: Timeline
    watchdog: Watchdog
    progress: Progress


@contextmanager
def open_context(
    settings: Settings, inputs: RunInputs, find_checkpoints: FindCheckpoints = tuple, greeting: str = ""
) -> Iterator[RolloutContext]:
    """Open an RL job: start the engine, build the policy, resume; yield a TrainContext on ranks that train."""
    with _open_job(settings, inputs, settings.run.steps, find_checkpoints) as (runtime, resumed), ExitStack() as stack:
        job = runtime.job
        rollout = runtime.rollout
        progress = runtime.progress
        state = replace(resumed.state, data=inputs.train.digest or resumed.state.data)  # a replay reads no data
        preemption = PreemptionHandler()
        recorded = None
        if not inputs.replay:
            recorded = read_recorded(settings.run.folder / ROLLOUTS, rollout.host_ranks, job)
        greeting = greeting or _greeting(settings, inputs, job=job, state=state, recorded=recorded)
        warnings = (*resumed.damages, *inputs.warnings)
        show_notes(progress, job.rank, greeting=greeting, notes=resumed.changes, warnings=warnings)
        offload = platform.on_cuda() and settings.shares_devices and settings.model.offloads and not inputs.replay
        limit_s = settings.monitor.phase_timeout_s
        parallel = make_parallel(job, settings.layout, settings.run.seed, limit_s) if job.trains else None
        has_reference = settings.algorithm.kl.coef > 0
        build = partial(_build_models, settings, parallel, resumed, has_reference) if parallel else None
        policy, critic = _start(runtime, START_TIMEOUT_S, offload, build)
        phases = _make_phases(settings, runtime, policy=policy, critic=critic, offload=offload)
        weight_sync, check = _make_sync(settings, inputs, policy, runtime, phases=phases)
        former = (
            Reference(policy.trained_tensors)
            if policy and settings.keeps_former_weights and not inputs.replay
            else None
        )
        recovery = EngineRecovery(
            rollout, job, phases, weight_sync, engine_check=check, version=state.optimizer_step, former=former
        )
        common = RolloutContext(
            settings=settings,
            inputs=inputs,
            job=job,
            rollout=rollout,
            collector=_make_collector(settings, inputs, runtime, phases, recovery=recovery, recorded=recorded),
            evaluator=_make_evaluator(
                settings, inputs, EngineContext(job, rollout, phases=phases, progress=progress, recovery=recovery)
            ),
            weight_sync=weight_sync,
            engine_check=check,
            recovery=recovery,
            phases=phases,
            timeline=runtime.timeline,
            progress=progress,
            preemption=preemption,
            state=state,
        )
        stack.enter_context(platform.gc_frozen())
        if policy:
            saver = stack.enter_context(CheckpointSaver(settings.run, policy, limit_s, not offload, critic=critic))
            yield TrainContext(**vars(common), parallel=policy.parallel, policy=policy, critic=critic, saver=saver)
        else:
            yield common
        phases.end()


def _build_models(settings: Settings, parallel: Parallel, resumed: Resumed, with_reference: bool) -> Models:
    policy = build_policy(
        settings, parallel, state=resumed.state, checkpoint=resumed.checkpoint, with_reference=with_reference
    )
    return policy, build_critic(settings, parallel, resumed.checkpoint) if settings.critic else None


def _make_collector(
    settings: Settings,
    inputs: RunInputs,
    runtime: RankRuntime,
    phases: PhaseManager,
    recovery: EngineRecovery,
    recorded: RecordedGroups | None,
) -> Collector:
    if inputs.replay:
        return ReplayCollector(inputs.replay, runtime.job, phases)
    keeps, curriculum = inputs.extensions.group_filter, inputs.extensions.curriculum
    return RolloutCollector(
        *(settings, inputs.train, runtime.rollout, inputs.scorer, runtime.job, phases, keeps, recovery, curriculum),
        recorded,
    )


def _make_evaluator(settings: Settings, inputs: RunInputs, engines: EngineContext) -> Evaluator:
    scorer, shown = inputs.scorer.for_evaluations(), SHOWN_SAMPLES
    return Evaluator(inputs.evals, scorer, samples_shown=shown, **vars(engines))


def _make_sync(
    settings: Settings,
    inputs: RunInputs,
    policy: Policy | None,
    runtime: RankRuntime,
    phases: PhaseManager,
) -> tuple[WeightSync, EngineCheck] | tuple[None, None]:
    """Return the weight sync and the engine check that runs after each sync; (None, None) in a replay."""
    if inputs.replay:
        return None, None
    shards = PolicyShards.of_policy(policy) if policy else PolicyShards.none(inputs.hf, settings.layout)
    weight_sync = build_weight_sync(
        settings.engine, settings.model, settings.sync, shards=shards, rollout=runtime.rollout, job=runtime.job
    )
    cache_dtype = str(settings.engine.args.get("kv_cache_dtype"))
    fp8 = (weight_sync.resharder.wire.fp8, settings.training.fp8_format, "fp8" in cache_dtype)
    check = EngineCheck(
        policy,
        has_experts=model_shape(inputs.hf).num_experts > 0,
        job=runtime.job,
        weight_sync=weight_sync,
        engines=runtime.rollout,
        phases=phases,
        prompts=[prompt.tokens for prompt in islice(inputs.train, MAX_PROMPTS)],
        longest=settings.rollout.max_prompt_tokens + settings.rollout.max_response_tokens,
        precision="fp8" if any(fp8) else settings.model.dtype,
        tolerance=settings.sync.check_tolerance,
        correction=settings.algorithm.rollout_correction,
    )
    return weight_sync, check


def _make_phases(
    settings: Settings, runtime: RankRuntime, policy: Policy | None, critic: Critic | None, offload: bool
) -> PhaseManager:
    """Return the phase manager. `offload`: phases move policy, critic and engine between host and device."""
    functions = None
    if offload and policy:
        nccl = NcclMemory(settings.layout) if can_suspend(torch.cuda.nccl.version(), os.environ) else None
        moves = settings.optimizer.offload == "step"
        functions = offload_functions(
            policy,
            runtime.rollout,
            optimizer_moves=moves,
            communicators=nccl,
            critic=critic,
        )
    return PhaseManager(
        runtime.timeline,
        runtime.watchdog,
        progress=runtime.progress,
        limit_s=settings.monitor.phase_timeout_s * (1 if policy else WAITED_PHASES),
        offload_functions=functions,
        resident=INITIAL_RESIDENCY if offload else None,
        items=partial(device_items, *filter(None, (policy, critic))) if policy else dict,
    )


@contextmanager
def open_engines_only(settings: Settings, inputs: RunInputs, greeting: str) -> Iterator[EngineContext]:
    """Open a job without a policy: start this rank's engine with the weights of `model.path`."""
    with _open_job(settings, inputs, steps=0, load_weights=True) as (runtime, _):
        job = runtime.job
        rollout = runtime.rollout
        progress = runtime.progress
        show_notes(progress, job.rank, greeting=greeting, notes=(), warnings=inputs.warnings)
        _start(runtime, START_TIMEOUT_S, offload=False, build=None)
        monitor = settings.monitor
        phases = PhaseManager(runtime.timeline, runtime.watchdog, progress, monitor.phase_timeout_s)
        yield EngineContext(
            job, rollout, phases=phases, progress=progress, recovery=EngineRecovery(rollout, job, phases)
        )


@contextmanager
def _open_job(
    settings: Settings,
    inputs: RunInputs,
    steps: int,
    find_checkpoints: FindCheckpoints = tuple,
    load_weights: bool = False,
) -> Iterator[tuple[RankRuntime, Resumed]]:
    """Create the process groups, claim the run folder, place the engines, open the monitors; close all at the end."""
    resolved = dump_settings(settings)
    with join_run(settings, resolved, find_checkpoints, settings.engine.ranks) as (job, resumed), ExitStack() as stack:
        parts = RolloutParts(inputs.hf, inputs.tokenizer, inputs.scorer, inputs.episodes, inputs.teacher)
        rollout = Rollout(settings, parts, job.rank, job.world_size, load_weights, has_engines=inputs.replay is None)
        stack.enter_context(rollout)
        stack.callback(inputs.scorer.close)
        if inputs.teacher:
            stack.callback(inputs.teacher.close)
        folder, done = settings.run.folder, resumed.state.step
        with open_monitors(folder, job.rank, steps=steps, done=done, stops=(rollout.stop,)) as monitors:
            yield RankRuntime(job, rollout, **vars(monitors)), resumed


def _start(
    runtime: RankRuntime, timeout_s: float, offload: bool, build: Callable[[], Models] | None
) -> Models | tuple[None, None]:
    """Start this rank's engine and return the models of `build`; with `offload`, the engine starts first."""
    job, rollout = runtime.job, runtime.rollout
    with (
        runtime.watchdog.phase("START", timeout_s * (4 if rollout.reward_servers else 2)),
        runtime.progress.phase("START"),
    ):
        rollout.start(job.store)
        if offload:
            start_engines_first(rollout, job.group)
        with explain_out_of_memory(job.rank, "START", dict):
            models = build() if build else (None, None)
        if not offload:
            rollout.wait_ready()
            rollout.open_reward_servers(job.group, sleeps=False)
        dist.barrier(group=job.group)
    return models


def _greeting(
    settings: Settings, inputs: RunInputs, job: Job, state: TrainState, recorded: RecordedGroups | None
) -> str:
    rollout, engine_ranks = settings.rollout, f", {job.engine_ranks} of them for engines" if job.engine_ranks else ""
    start = f"resumes after step {state.step}" if state.step else "starts"
    if recorded and (groups := recorded.count(state.groups_launched)):
        what, verb = ("group", "is") if groups == 1 else ("groups", "are")
        later = " and later" if rollout.max_staleness else ""
        start += f"; {groups} recorded {what} of step {state.step + 1}{later} {verb} taken up"
    return (
        f"{settings.run.folder}: {start}; {settings.model.path} on {job.world_size} ranks{engine_ranks}, "
        f"{rollout.prompts_per_step} prompts x {rollout.group_size} samples a step, "
        f"{settings.optimizer_steps_per_step} update(s) a step; "
        f"{f'replaying {inputs.replay.folder}' if inputs.replay else 'starting the engines'}"
    )
