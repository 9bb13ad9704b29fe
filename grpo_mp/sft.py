"""Supervised fine-tuning. `torchrun ... -m grpo_mp.sft CONFIG section.key=value ...`; `--dry-run` only checks."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from grpo_mp.utils.processes import end_with_launcher

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the seconds of imports without a trace
    end_with_launcher()

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import FINAL, METRICS, resumable_checkpoints, saved_state
from grpo_mp.config import SftSettings, load_sft_settings
from grpo_mp.data.cursor import Cursor
from grpo_mp.monitor.loggers import open_loggers
from grpo_mp.monitor.reporter import Reporter
from grpo_mp.monitor.rules import RuleWatch
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.monitor.timeline import merge_traces
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.command_line import command, print_once, started_job
from grpo_mp.trainer.describe import describe_sft
from grpo_mp.trainer.loop import (
    end_report,
    export,
    export_step,
    finish_report,
    finish_save,
    is_due,
    make_guards,
    make_reporter,
    note_skipped,
    save,
    save_last,
)
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.trainer.sft_context import SftContext, open_sft_context
from grpo_mp.trainer.sft_preflight import SftInputs, run_sft_preflight
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


def fine_tune(ctx: SftContext, reporter: Reporter) -> None:
    """Run supervised fine-tuning: take samples, update the policy by the mean loss of their learned tokens."""
    run, logger = ctx.settings.run, make_logger(ctx)
    if ctx.state.step == 0:
        logger.write(0, StepRecord(evaluate(ctx)))
    first_step, guards = ctx.state.step, make_guards(ctx)
    while ctx.state.step < run.steps and not ctx.should_stop():
        step = ctx.state.step + 1
        logger.begin_step()

        batch = take_samples(ctx)
        report, measured = update_policy(ctx, batch, step)

        record = step_record(ctx, logger, batch=batch, report=report, measured=measured)
        if is_due(step, run.eval_every, run.steps):
            record.scalars.update(evaluate(ctx))
        logger.write(step, record)
        ctx.progress.step(step, record.scalars)
        reporter.step(step)
        guards.check(step, record.scalars)
        if run.export_every and step % run.export_every == 0:
            export_step(ctx, step)  # before the save: what a start resumes behind is there
        if is_due(step, run.save_every, run.steps):
            save(ctx, logger, last=step == run.steps)
    end_report(ctx, reporter)
    save_last(ctx, logger, first_step)
    logger.close()
    finish(ctx)
    finish_report(ctx, reporter)


def make_logger(ctx: SftContext) -> StepLogger:
    """Open the loggers of the run, which continue after the steps that are done; lines of later steps are dropped."""
    settings, first_step = ctx.settings, ctx.state.step + 1 if ctx.state.step else 0
    make_loggers = ctx.inputs.make_loggers if ctx.parallel.rank == 0 else ()
    loggers = open_loggers(make_loggers, settings.run.folder, first_step, settings.model_dump(mode="json"))
    watch = RuleWatch()
    for line in read_metrics(settings.run.folder / METRICS) if ctx.parallel.rank == 0 else ():
        watch.step(line)
    return StepLogger(
        settings.run.folder,
        epochs=1,
        samples_per_step=0,
        parallel=ctx.parallel,
        timeline=ctx.timeline,
        progress=ctx.progress,
        loggers=loggers,
        memory_tracker=ctx.phases.memory_tracker,
        expert_load=ctx.policy.expert_load,
        watch=watch,
    )


def take_samples(ctx: SftContext) -> SftBatch:
    """Take the samples of the next step, and pack those that this rank computes."""
    cursor = ctx.state.cursor or Cursor(seed=ctx.settings.run.seed)
    with ctx.phases.phase(Phase.TRAIN, "samples"):
        return next_batch(
            ctx.settings, ctx.inputs.train, cursor=cursor, samples_seen=ctx.state.samples_seen, policy=ctx.policy
        )


def update_policy(ctx: SftContext, batch: SftBatch, step: int) -> tuple[UpdateReport, dict[str, float]]:
    """Make the step's optimizer update, and advance the state; return what was measured, too."""
    finish_save(ctx)  # it reads weights and the optimizer's state
    replicas_every = ctx.settings.monitor.check_replicas_every
    with ctx.phases.phase(Phase.TRAIN):
        if replicas_every and step % replicas_every == 0:
            check_replicas(ctx.policy, step)
        report, measured = supervised_update(ctx.policy, batch.packed)
        skipped_in_a_row = note_skipped(ctx, [report], step)
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
    """Collect what is logged of the step but its evaluation. Every rank must call this."""
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
    """Return the losses of the held-out sets. Every rank must call this."""
    settings, metrics = ctx.settings, dict[str, float]()
    if not ctx.inputs.evals:
        return metrics
    limit = settings.training.max_tokens_per_microbatch
    with ctx.phases.phase(Phase.EVAL):
        for name, losses in held_out_losses(ctx.policy, ctx.inputs.evals, settings.sft.batch_size, limit):
            metrics |= losses
            ctx.progress.note(f"held-out loss after step {ctx.state.step}: {name} {next(iter(losses.values())):.4f}")
    return metrics


def finish(ctx: SftContext) -> None:
    """Export the Hugging Face folder, and merge the traces."""
    run = ctx.settings.run
    if ctx.state.step < run.steps:
        ctx.progress.note(f"stopped after step {ctx.state.step}: run the same command to resume")
        return
    if run.export:
        export(ctx, run.folder / FINAL)
    if ctx.parallel.rank == 0:
        merge_traces(run.folder)
        ctx.progress.finish({}, {})


def run(settings: SftSettings, inputs: SftInputs) -> None:
    """Fine-tune as one rank of a started job; `settings`: as loaded. Raises UserError for what a user can fix."""
    checkpoints = partial(resumable_checkpoints, settings.run.folder, inputs.train.digest)
    with open_sft_context(settings, inputs, checkpoints) as ctx, make_reporter(ctx) as reporter:
        fine_tune(ctx, reporter)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, see `grpo-mp sft --help`. Raises SystemExit where it fails."""
    with (
        command(sft_parser(), arguments) as args,
        started_job(args.ranks, args.dry_run, args.ranks_per_node) as (world_size, ranks_per_node),
    ):
        settings = load_sft_settings(args.config, args.overrides, platform.default_dtype())
        inputs = run_sft_preflight(settings, world_size)
        if args.dry_run:
            state = saved_state(settings.run.folder)
            settings = settings.with_steps(inputs.train.epoch_size, state.step, state.samples_seen)
            print_once(describe_sft(settings, inputs, world_size, ranks_per_node, args.all))
        else:
            run(settings, inputs)


if __name__ == "__main__":
    main()
