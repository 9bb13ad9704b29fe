"""One run of one rank: its parts, put together in the right order and taken apart in any case."""

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import (
    TrainState,
    checkpoint_checksums,
    claim_run_folder,
    latest_checkpoint,
    read_manifest,
)
from grpo_mp.config import Settings, dump_settings
from grpo_mp.data.cursor import Cursor
from grpo_mp.distributed.process_groups import Parallel, start_parallel, stop_parallel
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.policy.checkpoint import load_policy, load_reference
from grpo_mp.policy.megatron_config import DTYPES
from grpo_mp.policy.offload import device_items
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.precision import in_fp8
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.scheduler.out_of_memory import explain_out_of_memory
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.trainer.exit import ignore_more_interrupts, report_error_once
from grpo_mp.trainer.offload import AFTER_START, offload_enabled, offload_functions, start_engines_first
from grpo_mp.trainer.preemption import PreemptionHandler
from grpo_mp.trainer.preflight import Inputs
from grpo_mp.weight_sync.ipc import IpcTransport
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import HostTransport, Transport, uses_cuda_ipc
from grpo_mp.weight_sync.update import WeightSync, make_plan


@dataclass
class TrainContext:
    """The parts of a running job on this rank. `state` is where the run stands."""

    settings: Settings
    inputs: Inputs
    parallel: Parallel
    policy: Policy
    rollout: Rollout
    sync: WeightSync
    scheduler: PhaseManager
    timeline: Timeline
    progress: Progress
    stop: PreemptionHandler
    state: TrainState

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes for the job."""
        return self.parallel.rank == 0

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; the slowest rank is waited for here. Every rank must call this."""
        with self.scheduler.waiting():
            return self.stop.agreed(self.parallel.cpu_group)

    def cursor_of(self, state: TrainState) -> Cursor:
        """Where a state stands in the train prompts."""
        return Cursor.from_dict(state.cursor) if state.cursor else Cursor(seed=self.settings.run.seed)


@contextmanager
def open_train_context(
    settings: Settings, inputs: Inputs, checkpoint: Path | None = None, greeting: str = ""
) -> Iterator[TrainContext]:
    """Join the job, start this rank's engine, build the policy, go on from `checkpoint` where there is one.

    Engines end when the body does, however it ends.
    """
    with ExitStack() as stack:
        parallel = start_parallel(settings.layout, settings.run.seed, settings.monitor.phase_timeout_s)
        stack.enter_context(report_error_once(parallel.rank, parallel.store))
        if parallel.rank == 0:
            claim_run_folder(settings.run.folder, dump_settings(settings))
        dist.barrier(group=parallel.cpu_group)
        stop = PreemptionHandler()
        state = read_manifest(checkpoint) if checkpoint else TrainState()
        rollout = stack.enter_context(
            Rollout(settings, inputs.tokenizer, inputs.scorer, parallel.rank, parallel.world_size)
        )
        progress = stack.enter_context(
            Progress(settings.run.folder, settings.run.steps, done=state.step, rank=parallel.rank)
        )
        watchdog = stack.enter_context(
            Watchdog(parallel.rank, settings.run.folder, before_exit=(progress.stop, rollout.stop))
        )
        timeline = Timeline(settings.run.folder, parallel.rank)
        stack.callback(timeline.close)
        stack.callback(inputs.scorer.close)
        stack.push(ignore_more_interrupts)
        for note in (greeting or _greeting(settings, parallel, state), *_start_notes(inputs, parallel, not greeting)):
            progress.note(note)
        with watchdog.phase("START", settings.engine.start_timeout_s * 2), progress.phase("START"):
            rollout.start(parallel.store)
            alone = offload_enabled(settings)
            if alone:
                start_engines_first(rollout, parallel.cpu_group)
            with explain_out_of_memory(parallel.rank, "START", dict):
                policy = build_policy(settings, parallel, state, checkpoint)
            if not alone:
                rollout.wait_ready()
            dist.barrier(group=parallel.cpu_group)
        if rollout.client:
            progress.note(rollout.call(rollout.client.capabilities()).sentence)
        session = TrainContext(
            settings=settings,
            inputs=inputs,
            parallel=parallel,
            policy=policy,
            rollout=rollout,
            sync=_build_sync(settings, parallel, policy, rollout),
            scheduler=_build_scheduler(settings, policy, rollout, (timeline, watchdog, progress)),
            timeline=timeline,
            progress=progress,
            stop=stop,
            state=state,
        )
        with platform.gc_frozen():
            yield session
        stop_parallel()


def newest_checkpoint(settings: Settings) -> Path | None:
    """Where a run goes on; None at its start."""
    return latest_checkpoint(settings.run.folder) if settings.run.resume == "auto" else None


def build_policy(settings: Settings, parallel: Parallel, state: TrainState, folder: Path | None) -> Policy:
    policy = Policy(settings, parallel, with_reference=settings.algorithm.kl.measured_share > 0)
    if folder:
        checkpoint_checksums(folder).check_share(parallel.rank, parallel.world_size)
        dist.barrier(group=parallel.cpu_group)  # what one rank finds, no other must read
        load_policy(policy, folder / "policy")
        if state.reference_refreshed and policy.reference:
            load_reference(policy, folder / "reference")
    return policy


def _build_scheduler(
    settings: Settings, policy: Policy, rollout: Rollout, monitors: tuple[Timeline, Watchdog, Progress]
) -> PhaseManager:
    movers = offload_functions(settings, policy, rollout)
    resident, items = AFTER_START if movers else None, partial(device_items, policy)
    return PhaseManager(*monitors, settings.monitor.phase_timeout_s, movers, resident, items)


def _build_sync(settings: Settings, parallel: Parallel, policy: Policy, rollout: Rollout) -> WeightSync:
    targets = rollout.ranks if uses_cuda_ipc(settings.sync) else rollout.hosts
    plan = make_plan(
        policy.params,
        policy.local_shards(),
        targets,
        settings.sync.bucket_bytes,
        DTYPES[settings.model.dtype],
        parallel.cpu_group,
    )
    fp8 = in_fp8(settings.engine.args, policy.hf, cpu=not platform.on_cuda())
    resharder = Resharder(plan, policy.params, policy.tensors, policy.tp_sizes(), parallel.rank in targets, fp8)
    return WeightSync(resharder, _transport(settings, parallel, rollout), rollout.call)


def _transport(settings: Settings, parallel: Parallel, rollout: Rollout) -> Transport | None:
    if not uses_cuda_ipc(settings.sync):
        return HostTransport(rollout.client, settings.engine.gpus) if rollout.client else None
    size = settings.engine.gpus
    groups = engine_groups(rollout.hosts, size, settings.monitor.phase_timeout_s)
    mine = parallel.rank // size
    return IpcTransport(rollout.client, groups[mine]) if mine < len(groups) else None


def engine_groups(hosts: Sequence[int], size: int, timeout_s: float) -> list[dist.ProcessGroup]:
    """A gloo group of the ranks of each engine; every rank must call this. Without a limit torch sets its own."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return [dist.new_group(list(range(host, host + size)), timeout=timeout, backend="gloo") for host in hosts]


def _start_notes(inputs: Inputs, parallel: Parallel, trains: bool) -> list[str]:
    """What a user should know before the run goes on, on the rank that prints."""
    if parallel.rank:
        return []
    return [*(inputs.overlaps() if trains else []), *(f"warning: {text}" for text in inputs.warnings)]


def _greeting(settings: Settings, parallel: Parallel, state: TrainState) -> str:
    rollout = settings.rollout
    start = f"goes on after step {state.step}" if state.step else "starts"
    return (
        f"{settings.run.folder}: {start}; {settings.model.path} on {parallel.world_size} ranks, "
        f"{rollout.prompts_per_step} prompts x {rollout.group_size} samples a step, "
        f"{settings.optimizer_steps_per_step} update(s) a step; starting the engines"
    )


def local_ranks() -> tuple[int, int]:
    """(world size, ranks of this node) as torchrun or srun says; one rank when neither started us."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
