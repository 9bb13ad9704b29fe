"""Engines that serve a Hugging Face folder by themselves: a job without a policy."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from grpo_mp.checkpoint.run_state import claim_run_folder
from grpo_mp.config import Layout, Settings, dump_settings
from grpo_mp.distributed.process_groups import Parallel, start_parallel, stop_parallel
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.trainer.exit import ignore_more_interrupts, report_error_once
from grpo_mp.trainer.preflight import Inputs


@dataclass(frozen=True)
class EnginesOnly:
    """The parts of the job on this rank. Engines keep the weights that they loaded, and the device."""

    settings: Settings
    inputs: Inputs
    parallel: Parallel
    rollout: Rollout
    scheduler: PhaseManager
    progress: Progress


@contextmanager
def open_engines_only(settings: Settings, inputs: Inputs, greeting: str) -> Iterator[EnginesOnly]:
    """Join the job and start this rank's engine on `model.path`; engines end when the body does, however it ends."""
    folder, limit_s = settings.run.folder, settings.monitor.phase_timeout_s
    with ExitStack() as stack:
        parallel = start_parallel(Layout(), settings.run.seed, limit_s)
        stack.enter_context(report_error_once(parallel.rank, parallel.store))
        if parallel.rank == 0:
            claim_run_folder(folder, dump_settings(settings))
        dist.barrier(group=parallel.cpu_group)
        rollout = stack.enter_context(
            Rollout(settings, inputs.tokenizer, inputs.scorer, parallel.rank, parallel.world_size, own_weights=True)
        )
        progress = stack.enter_context(Progress(folder, steps=0, rank=parallel.rank))
        watchdog = stack.enter_context(Watchdog(parallel.rank, folder, before_exit=(progress.stop, rollout.stop)))
        timeline = Timeline(folder, parallel.rank)
        stack.callback(timeline.close)
        stack.callback(inputs.scorer.close)
        stack.push(ignore_more_interrupts)
        for note in (greeting, *(f"warning: {text}" for text in inputs.warnings)):
            progress.note(note)
        with watchdog.phase("START", settings.engine.start_timeout_s * 2), progress.phase("START"):
            rollout.start(parallel.store)
            rollout.wait_ready()
            dist.barrier(group=parallel.cpu_group)
        scheduler = PhaseManager(timeline, watchdog, progress, limit_s)
        yield EnginesOnly(settings, inputs, parallel, rollout, scheduler, progress)
        stop_parallel()
