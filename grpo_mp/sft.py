"""Supervised fine-tuning. `torchrun ... -m grpo_mp.sft CONFIG section.key=value ...`; `--dry-run` only checks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from grpo_mp.utils.processes import begin_slow_imports

if __name__ == "__main__":
    begin_slow_imports()

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import check_same_data, resumable_checkpoints, saved_state, write_settings
from grpo_mp.config import SftSettings, dump_settings, load_sft_settings, show_settings
from grpo_mp.data.chat_data import ChatEncoder, ChatReader, ChatSet, load_held_out_chats, load_train_chats, stop_tokens
from grpo_mp.data.cursor import Cursor
from grpo_mp.distributed.process_groups import make_parallel
from grpo_mp.monitor.loggers import MakeLogger, load_loggers
from grpo_mp.policy.offload import device_items
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.command_line import command, print_once, started_job
from grpo_mp.trainer.describe import describe_chats, describe_ranks, dry_run_text
from grpo_mp.trainer.exit import PreemptionHandler
from grpo_mp.trainer.job import build_policy, join_run, open_monitors, show_notes, starting
from grpo_mp.trainer.loop import PolicyContext, is_due
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.trainer.preflight import check_export, check_place, data_warnings, read_model
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.trainer.save import CheckpointSaver
from grpo_mp.trainer.sft_step import (
    SftBatch,
    held_out_losses,
    next_batch,
    sft_metrics,
    supervised_update,
)
from grpo_mp.trainer.step_logger import StepLogger, StepRecord
from grpo_mp.utils.parsers import sft_parser
from grpo_mp.utils.phases import Phase


@dataclass(frozen=True)
class SftInputs:
    """Inputs of supervised fine-tuning: tokenizer, samples, loggers. `warnings`: shown at the start."""

    tokenizer: PreTrainedTokenizerBase
    train: ChatSet
    evals: dict[str, ChatSet]
    make_loggers: tuple[MakeLogger, ...]
    warnings: tuple[str, ...]


@dataclass(kw_only=True)
class SftContext(PolicyContext):
    """Parts of a supervised fine-tuning job on one rank; every rank trains."""

    settings: SftSettings
    inputs: SftInputs


def fine_tune(ctx: SftContext) -> None:
    """Run supervised fine-tuning: each step minimizes the mean cross-entropy of the batch's loss tokens."""
    run = ctx.settings.run
    inputs = ctx.inputs
    logger = ctx.open_logger(ctx.settings.model_dump(mode="json"), inputs.make_loggers)
    if ctx.state.step == 0:
        logger.write(0, StepRecord(evaluate(ctx)))
    with ctx.reporting(logger):
        for step in ctx.steps():
            batch = take_samples(ctx)
            report, measured = update_policy(ctx, batch, step)
            record = step_record(ctx, logger, batch=batch, report=report, measured=measured)
            if is_due(step, run.eval_every, run):
                record.scalars.update(evaluate(ctx))
            ctx.end_step(step, record)
        ctx.end()
        if ctx.finish() and ctx.parallel.rank == 0:
            ctx.progress.finish({}, {})


def take_samples(ctx: SftContext) -> SftBatch:
    """Return the samples of the next step, with this rank's share packed into micro-batches."""
    settings = ctx.settings
    train = ctx.inputs.train
    cursor = ctx.state.cursor or Cursor(seed=settings.run.seed)
    with ctx.phases.phase(Phase.TRAIN, "samples"):
        count = settings.step_samples(train.epoch_size, ctx.state.samples_seen)
        max_tokens = settings.training.max_tokens_per_microbatch
        return next_batch(train, cursor, count, shuffle=settings.data.shuffle, max_tokens=max_tokens, policy=ctx.policy)


def update_policy(ctx: SftContext, batch: SftBatch, step: int) -> tuple[UpdateReport, dict[str, float]]:
    """Run the step's optimizer update and advance `ctx.state`; return its report and the loss metrics."""
    ctx.finish_save()
    with ctx.phases.phase(Phase.TRAIN):
        check_replicas(ctx.policy, step)
        report, measured = supervised_update(ctx.policy, batch.packed)
        skipped_in_a_row = ctx.note_skipped([report], step)
    ctx.state = replace(
        ctx.state,
        step=step,
        optimizer_step=ctx.state.optimizer_step + 1,
        samples_seen=ctx.state.samples_seen + len(batch.indices),
        cursor=batch.cursor,
        skipped_in_a_row=skipped_in_a_row,
    )
    return report, measured


def step_record(
    ctx: SftContext, logger: StepLogger, batch: SftBatch, report: UpdateReport, measured: dict[str, float]
) -> StepRecord:
    """Collect the metrics of a step, without its evaluation."""
    _, summary, record = logger.common_record()
    record.scalars.update(
        sft_metrics(batch.packed, report, measured=measured, summary=summary, ranks=ctx.job.world_size)
        | {
            "sft/epoch": ctx.state.samples_seen / ctx.inputs.train.epoch_size,
            "train/optimizer_step": ctx.state.optimizer_step,
            "train/samples_seen": ctx.state.samples_seen,
        }
    )
    return record


def evaluate(ctx: SftContext) -> dict[str, float]:
    """Return the loss of each held-out set, by metric name."""
    settings = ctx.settings
    metrics = dict[str, float]()
    if not ctx.inputs.evals:
        return metrics
    limit = settings.training.max_tokens_per_microbatch
    with ctx.phases.phase(Phase.EVAL):
        for name, losses in held_out_losses(ctx.policy, ctx.inputs.evals, settings.sft.batch_size, limit):
            metrics |= losses
            ctx.progress.note(f"held-out loss after step {ctx.state.step}: {name} {next(iter(losses.values())):.4f}")
    return metrics


def read_inputs(settings: SftSettings, world_size: int) -> SftInputs:
    """Check settings against model, files and layout, and read the data."""
    run = settings.run
    model = settings.model
    make_loggers = load_loggers(settings.monitor.loggers)
    check_place(run, settings.monitor, dump_settings(settings))
    hf, tokenizer = read_model(model, settings.layout, settings.training, world_size)
    hf.check_positions(settings.sft.max_tokens, "sft.max_tokens")
    check_export(run, model)
    stops = stop_tokens(model.path, tokenizer)
    variables = settings.data.chat_template_kwargs
    reader = ChatReader(settings.data, settings.sft, ChatEncoder(tokenizer, settings.sft.loss_on, stops, variables))
    train = load_train_chats(reader)
    check_same_data(run.folder, train.digest)
    train.check_size("sft.batch_size", settings.sft.batch_size, "samples", settings.data.train)
    evals = load_held_out_chats(reader)
    return SftInputs(tokenizer, train, evals, make_loggers, warnings=tuple(data_warnings(train, evals)))


@contextmanager
def open_context(settings: SftSettings, inputs: SftInputs) -> Iterator[SftContext]:
    """Open an SFT job: build the policy and resume; the settings of the context have `run.epochs` as `run.steps`."""
    limit_s = settings.monitor.phase_timeout_s
    size = inputs.train.epoch_size
    resolved = dump_settings(settings.with_steps(size))
    find_checkpoints = partial(resumable_checkpoints, settings.run.folder, inputs.train.digest)
    with ExitStack() as stack:
        job, resumed = stack.enter_context(join_run(settings.run, limit_s, resolved, find_checkpoints))
        settings = settings.with_steps(size, resumed.state.step, resumed.state.samples_seen)
        run = settings.run
        if job.rank == 0:
            write_settings(run.folder, dump_settings(settings))
        monitors = stack.enter_context(open_monitors(run.folder, job.rank, run.steps, resumed.state.step))
        preemption = PreemptionHandler()
        state = replace(resumed.state, data=inputs.train.digest)
        start = f"resumes after step {state.step}" if state.step else "starts"
        greeting = (
            f"{run.folder}: {start}; {settings.model.path} on {job.world_size} ranks, "
            f"{settings.sft.batch_size} samples a step"
        )
        show_notes(monitors.progress, job.rank, greeting, resumed, inputs.warnings)
        parallel = make_parallel(job, settings.layout, run.seed)
        with starting(monitors, limit_s):
            policy = build_policy(settings, parallel, state, resumed.checkpoint)
            dist.barrier(group=job.group)
        items = partial(device_items, policy)
        phases = PhaseManager(monitors.timeline, monitors.watchdog, monitors.progress, limit_s, items=items)
        with platform.gc_frozen(), CheckpointSaver(run, policy, limit_s, weights_stay=True) as saver:
            yield SftContext(
                settings=settings,
                inputs=inputs,
                job=job,
                phases=phases,
                timeline=monitors.timeline,
                progress=monitors.progress,
                preemption=preemption,
                state=state,
                parallel=parallel,
                policy=policy,
                critic=None,
                saver=saver,
            )


def run(settings: SftSettings, inputs: SftInputs) -> None:
    """Fine-tune as one rank of a started job. `settings`: as loaded, before epochs are converted to steps."""
    with open_context(settings, inputs) as ctx:
        fine_tune(ctx)


def describe(
    settings: SftSettings, inputs: SftInputs, world_size: int, ranks_per_node: int, every_setting: bool
) -> str:
    """Return the text of a dry run: layout, sizes, first sample, warnings, and settings as YAML."""
    steps = settings.run.steps
    size = settings.sft.batch_size
    facts = [
        describe_ranks(settings.layout, world_size, 0, ranks_per_node),
        f"{steps} steps of {size} samples: {steps * size / inputs.train.epoch_size:.2f} epochs",
        *describe_chats(inputs.train, inputs.evals, settings.sft.max_tokens, inputs.tokenizer),
    ]
    return dry_run_text(facts, inputs.warnings, settings.run.folder, show_settings(settings, every_setting))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of `grpo-mp sft`; raise SystemExit on failure."""
    with (
        command(sft_parser(), arguments) as args,
        started_job(args.ranks, args.dry_run, args.ranks_per_node) as (world_size, ranks_per_node),
    ):
        settings = load_sft_settings(args.config, args.overrides, platform.default_dtype())
        inputs = read_inputs(settings, world_size)
        if args.dry_run:
            state = saved_state(settings.run.folder)
            settings = settings.with_steps(inputs.train.epoch_size, state.step, state.samples_seen)
            print_once(describe(settings, inputs, world_size, ranks_per_node, every_setting=args.all))
        else:
            run(settings, inputs)


if __name__ == "__main__":
    main()
