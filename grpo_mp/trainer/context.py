"""Open a job that generates on one rank: start the engine, build the models that it gets its weights from.

In jobs that only generate (evaluate.py, sample.py), engines load the weights of a Hugging Face folder themselves. For a
run's checkpoint, the policy is built as for training and sends its weights to the engines.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import MANIFEST, read_manifest
from grpo_mp.config import Settings, dump_settings, load_settings
from grpo_mp.config.sections import EngineConfig, LayoutConfig, TrainingConfig
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.nccl_memory import NcclMemory, can_suspend
from grpo_mp.distributed.process_groups import WAITED_PHASES, Job, make_parallel
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.offload import device_items
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.reference import Reference
from grpo_mp.rollout.engine_layout import attention_replicas
from grpo_mp.rollout.hosted_engine import START_TIMEOUT_S
from grpo_mp.rollout.rollout import Rollout, RolloutParts, engines_can_load_weights
from grpo_mp.trainer.engine_check import MAX_PROMPTS, EngineCheck
from grpo_mp.trainer.job import (
    FindCheckpoints,
    Monitors,
    Resumed,
    build_critic,
    build_policy,
    join_run,
    open_monitors,
    show_notes,
)
from grpo_mp.trainer.offload import INITIAL_RESIDENCY, offload_functions, start_engines_first
from grpo_mp.trainer.phase_manager import OffloadFunction, PhaseManager, explain_out_of_memory
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.trainer.recover import EngineRecovery
from grpo_mp.trainer.replay import ReplayedRollouts
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import Phase
from grpo_mp.weight_sync.update import PolicyShards, build_weight_sync
from grpo_mp.weight_sync.wire import WireFormat


@dataclass(frozen=True)
class Engines:
    """This rank's part of a job that generates. `policy`: None on ranks that only host an engine."""

    job: Job
    rollout: Rollout
    phases: PhaseManager
    monitors: Monitors
    recovery: EngineRecovery
    resumed: Resumed
    policy: Policy | None = None
    critic: Critic | None = None
    offloads: bool = False  # phases move models and engine between host and device


@contextmanager
def open_engines(
    settings: Settings,
    inputs: RunInputs,
    find_checkpoints: FindCheckpoints = tuple,
    builds_policy: bool = True,
    greeting: str = "",
) -> Iterator[Engines]:
    """Start this rank's engine; build policy and critic on ranks that train; close all at the end.

    `builds_policy=False`: engines load the weights of `model.path`.
    """
    run = settings.run
    limit_s = settings.monitor.phase_timeout_s
    generates = inputs.replay is None
    resolved = dump_settings(settings)
    with (
        join_run(run, limit_s, resolved, find_checkpoints, engine_ranks=settings.engine.ranks) as (job, resumed),
        ExitStack() as stack,
    ):
        parts = RolloutParts(inputs.hf, inputs.tokenizer, inputs.scorer, inputs.episodes, teacher=inputs.teacher)
        rollout = Rollout(settings, parts, job.rank, job.world_size, not builds_policy, has_engines=generates)
        stack.enter_context(rollout)
        stack.callback(inputs.scorer.close)
        if inputs.teacher:
            stack.callback(inputs.teacher.close)
        step = resumed.state.step
        monitors = stack.enter_context(open_monitors(run.folder, job.rank, run.steps, step, stops=(rollout.stop,)))
        greeting = greeting or _greeting(settings, inputs.replay, job.world_size, step)
        show_notes(monitors.progress, job.rank, greeting, resumed.changes, (*resumed.damages, *inputs.warnings))

        shares = settings.shares_devices and settings.model.offloads
        offloads = platform.on_cuda() and shares and builds_policy and generates
        policy = critic = None
        with _starting(job, rollout, monitors, engines_first=offloads):
            if builds_policy and job.trains:
                parallel = make_parallel(job, settings.layout, run.seed, limit_s)
                with_reference = settings.algorithm.kl.coef > 0
                policy = build_policy(settings, parallel, resumed.state, resumed.checkpoint, with_reference)
                if settings.critic:
                    critic = build_critic(settings.for_critic(), parallel, resumed.checkpoint)
        functions = {}
        if offloads and policy:
            moves = settings.optimizer.offload == "step"
            functions = offload_functions(policy, rollout, moves, _nccl_memory(settings.layout), critic=critic)
        phases = make_phases(monitors, rollout, policy, critic, limit_s, functions)
        recovery = EngineRecovery(rollout, job, phases, version=resumed.state.optimizer_step)
        engines = Engines(job, rollout, phases, monitors, recovery, resumed, policy, critic, offloads)
        if builds_policy and generates:
            shards = PolicyShards.of_policy(policy) if policy else PolicyShards.none(inputs.hf, settings.layout)
            sync = build_weight_sync(settings.engine, settings.model, settings.sync, shards, rollout, job)
            precision = _precision(sync.resharder.wire, settings.training, settings.engine, settings.model.dtype)
            recovery.weight_sync = sync
            recovery.engine_check = _engine_check(engines, inputs, settings, precision)
            if policy and settings.keeps_former_weights:
                recovery.former = Reference(policy.trained_tensors)
        yield engines
        phases.end()


def _precision(wire: WireFormat, training: TrainingConfig, engine: EngineConfig, dtype: str) -> str:
    """Return the lowest precision in which policy or engines compute: fp8, or the model's dtype."""
    in_fp8 = wire.fp8 or training.fp8_format or engine.has_fp8_cache
    return "fp8" if in_fp8 else dtype


@contextmanager
def _starting(job: Job, rollout: Rollout, monitors: Monitors, engines_first: bool) -> Iterator[None]:
    """Start this rank's engine and run the body, which builds the models, beside the start or after it."""
    limit_s = START_TIMEOUT_S * (4 if rollout.reward_servers else 2)
    with monitors.watchdog.phase("START", limit_s), monitors.progress.phase("START"):
        rollout.start(job.store)
        if engines_first:
            start_engines_first(rollout, job.group)
        with explain_out_of_memory(job.rank, "START", dict):
            yield
        if not engines_first:
            rollout.wait_ready()
            rollout.open_reward_servers(job.group, sleeps=False)
        dist.barrier(group=job.group)


def _nccl_memory(layout: LayoutConfig) -> NcclMemory | None:
    return NcclMemory(layout) if can_suspend(torch.cuda.nccl.version(), os.environ) else None


def make_phases(
    monitors: Monitors,
    rollout: Rollout,
    policy: Policy | None,
    critic: Critic | None,
    limit_s: float,
    functions: Mapping[str, OffloadFunction],
) -> PhaseManager:
    """Return the phase manager. `functions`: move models and engine between host and device; empty: nothing moves."""
    return PhaseManager(
        monitors.timeline,
        monitors.watchdog,
        progress=monitors.progress,
        limit_s=limit_s * (1 if policy else WAITED_PHASES),
        offload_functions=functions,
        resident=INITIAL_RESIDENCY if functions else None,
        items=partial(device_items, *filter(None, (policy, critic))) if policy else dict,
    )


def _engine_check(engines: Engines, inputs: RunInputs, settings: Settings, precision: str) -> EngineCheck:
    assert engines.recovery.weight_sync
    return EngineCheck(
        engines.policy,
        has_experts=model_shape(inputs.hf).num_experts > 0,
        job=engines.job,
        weight_sync=engines.recovery.weight_sync,
        engines=engines.rollout,
        phases=engines.phases,
        prompts=[prompt.tokens for prompt in islice(inputs.train, MAX_PROMPTS)],
        longest=settings.rollout.max_sequence_tokens,
        replicas=attention_replicas(settings.engine.args),
        precision=precision,
        tolerance=settings.sync.check_tolerance,
        correction=settings.algorithm.rollout_correction,
    )


@dataclass(frozen=True)
class EngineJob:
    """Settings and weights of a job that only generates; results go to `settings.run.folder`."""

    settings: Settings
    checkpoint: Path | None  # folder of a run's checkpoint; None: use `model.path`

    @property
    def name(self) -> Path:
        return self.checkpoint or self.settings.model.path

    @property
    def folder(self) -> Path:
        return self.settings.run.folder

    @property
    def needs_policy(self) -> bool:
        """Return whether a policy must send the weights, because engines cannot load them from the folder."""
        return self.checkpoint is not None or not engines_can_load_weights(self.settings.model, self.settings.engine)


def read_engine_job(args: argparse.Namespace, command: str) -> EngineJob:
    """Return the job that the parsed arguments describe; results go to --out, by default RUN/`command`/MODEL."""
    settings = load_settings(args.config, args.overrides, trains=False, dtype=platform.default_dtype())
    checkpoint, model = args.checkpoint, args.model or settings.model.path
    if checkpoint:
        if not (checkpoint / MANIFEST).is_file():
            raise UserError(f"{checkpoint}: incomplete checkpoint, {MANIFEST} is missing: give RUN/checkpoints/step_N")
        read_manifest(checkpoint)
    out = args.out or settings.run.folder / command / (checkpoint or model).absolute().name
    updates = {
        "run": settings.run.model_copy(update={"folder": out}),
        "model": settings.model.model_copy(update={"path": model}),
    }
    return EngineJob(settings.without_training().model_copy(update=updates), checkpoint)


def _greeting(settings: Settings, replay: ReplayedRollouts | None, ranks: int, step: int) -> str:
    start = f"resumes after step {step}" if step else "starts"
    source = f"replaying {replay.folder}" if replay else "starting the engines"
    return f"{settings.run.folder}: {start} on {ranks} ranks; {settings.step_summary}; {source}"


@contextmanager
def start_engines(job: EngineJob, inputs: RunInputs, greeting: str) -> Iterator[Engines]:
    """Run engines with the job's weights while the body runs."""
    checkpoints = [job.checkpoint] if job.checkpoint else []
    with open_engines(job.settings, inputs, lambda: checkpoints, job.needs_policy, greeting=greeting) as engines:
        if job.needs_policy:
            with engines.phases.phase(Phase.SYNC):
                engines.recovery.update_weights(engines.resumed.state.optimizer_step)
            engines.recovery.check_engines()
        yield engines
