"""Open an SFT job on one rank: join the process groups, build the policy; close everything at the end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import write_settings
from grpo_mp.config import SftSettings, dump_settings
from grpo_mp.distributed.process_groups import make_parallel
from grpo_mp.policy.offload import device_items
from grpo_mp.trainer.exit import PreemptionHandler
from grpo_mp.trainer.job import (
    FindCheckpoints,
    build_policy,
    join_run,
    open_monitors,
    show_notes,
)
from grpo_mp.trainer.loop import PolicyContext
from grpo_mp.trainer.phase_manager import PhaseManager, explain_out_of_memory
from grpo_mp.trainer.save import CheckpointSaver
from grpo_mp.trainer.sft_preflight import SftInputs

START = "START"


@dataclass(kw_only=True)
class SftContext(PolicyContext):
    """Parts of a supervised fine-tuning job on one rank; every rank trains."""

    settings: SftSettings
    inputs: SftInputs


@contextmanager
def open_sft_context(
    settings: SftSettings, inputs: SftInputs, find_checkpoints: FindCheckpoints = tuple
) -> Iterator[SftContext]:
    """Open an SFT job: build the policy and resume; the settings of the context have `run.epochs` as `run.steps`."""
    limit_s, size = settings.monitor.phase_timeout_s, inputs.train.epoch_size
    resolved = dump_settings(settings.with_steps(size))
    with ExitStack() as stack:
        job, resumed = stack.enter_context(join_run(settings.run, limit_s, resolved, find_checkpoints))
        settings = settings.with_steps(size, resumed.state.step, resumed.state.samples_seen)
        run = settings.run
        if job.rank == 0:
            write_settings(run.folder, dump_settings(settings))
        monitors = stack.enter_context(open_monitors(run.folder, job.rank, run.steps, resumed.state.step))
        preemption = PreemptionHandler()
        state = replace(resumed.state, data=inputs.train.digest)
        progress = monitors.progress
        start = f"resumes after step {state.step}" if state.step else "starts"
        greeting = (
            f"{run.folder}: {start}; {settings.model.path} on {job.world_size} ranks, "
            f"{settings.sft.batch_size} samples a step"
        )
        warnings = (*resumed.damages, *inputs.warnings)
        show_notes(progress, job.rank, greeting=greeting, notes=resumed.changes, warnings=warnings)
        parallel = make_parallel(job, settings.layout, run.seed, limit_s)
        with (
            monitors.watchdog.phase(START, limit_s),
            progress.phase(START),
            explain_out_of_memory(job.rank, START, dict),
        ):
            policy = build_policy(settings, parallel, state, resumed.checkpoint)
            dist.barrier(group=job.group)
        phases = PhaseManager(
            monitors.timeline, monitors.watchdog, progress, limit_s, items=partial(device_items, policy)
        )
        with platform.gc_frozen(), CheckpointSaver(run, policy, limit_s, weights_stay=True) as saver:
            yield SftContext(
                settings=settings,
                inputs=inputs,
                job=job,
                phases=phases,
                timeline=monitors.timeline,
                progress=progress,
                preemption=preemption,
                state=state,
                parallel=parallel,
                policy=policy,
                critic=None,
                saver=saver,
            )
