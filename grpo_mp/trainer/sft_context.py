"""Check and open an SFT job on one rank: read its inputs, join the process groups, build the policy."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import check_same_data, write_settings
from grpo_mp.config import SftSettings, dump_settings
from grpo_mp.data.chat_data import ChatEncoder, ChatReader, ChatSet, load_held_out_chats, load_train_chats, stop_tokens
from grpo_mp.distributed.process_groups import make_parallel
from grpo_mp.models.hf_config import HfConfig, check_positions
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.monitor.loggers import MakeLogger, load_loggers
from grpo_mp.policy.offload import device_items
from grpo_mp.policy.policy import check_policy
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
from grpo_mp.trainer.preflight import check_attention, check_export, check_place
from grpo_mp.trainer.save import CheckpointSaver

START = "START"


@dataclass(frozen=True)
class SftInputs:
    """Inputs of supervised fine-tuning: model config, tokenizer, samples. `warnings`: shown at the start."""

    hf: HfConfig
    tokenizer: PreTrainedTokenizerBase
    train: ChatSet
    evals: dict[str, ChatSet]
    make_loggers: tuple[MakeLogger, ...]
    warnings: tuple[str, ...]


def run_sft_preflight(settings: SftSettings, world_size: int) -> SftInputs:
    """Check settings against model, files and layout, and read the data."""
    make_loggers = load_loggers(settings.monitor.loggers)
    check_place(settings.run, settings.monitor, dump_settings(settings))
    check_attention(settings.model.dtype, settings.layout.context)
    hf = settings.model.read_config()
    tokenizer = read_tokenizer(settings.model.path, hf, settings.model.trust_remote_code)
    check_positions(hf, settings.sft.max_tokens, "sft.max_tokens")
    check_policy(hf, settings.model, layout=settings.layout, training=settings.training, world_size=world_size)
    check_export(settings.run, settings.model)
    stops, variables = stop_tokens(settings.model.path, tokenizer), settings.data.chat_template_kwargs
    encoder = ChatEncoder(tokenizer, settings.sft.loss_on, stops, variables)
    reader = ChatReader(settings.data, settings.sft, encoder)
    train = load_train_chats(reader)
    check_same_data(settings.run.folder, train.digest)
    train.check_size("sft.batch_size", settings.sft.batch_size, "samples", settings.data.train)
    evals = load_held_out_chats(reader)
    warnings = tuple(sentence for chats in (train, *evals.values()) for sentence in chats.warnings)
    return SftInputs(hf, tokenizer, train=train, evals=evals, make_loggers=make_loggers, warnings=warnings)


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
