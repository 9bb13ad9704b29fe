"""What the loops of RL and of supervised fine-tuning do alike: guards, checkpoints, exports."""

from pathlib import Path
from shutil import rmtree

from grpo_mp.checkpoint.hf_writer import incomplete_folder
from grpo_mp.checkpoint.run_state import EXPORTS, METRICS
from grpo_mp.distributed.process_groups import broadcast
from grpo_mp.monitor.guards import MetricGuards
from grpo_mp.monitor.reporter import Reporter
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.trainer.export_servers import load_export
from grpo_mp.trainer.job import PolicyContext
from grpo_mp.trainer.save import export_adapters, export_policy
from grpo_mp.trainer.step_logger import StepLogger, StepRecord
from grpo_mp.utils.errors import DiskError
from grpo_mp.utils.phases import SAVE_WAIT, Phase


def make_guards(ctx: PolicyContext) -> MetricGuards:
    """Guard the metrics as `monitor.guards` says, those of the steps that are done included."""
    past = broadcast(read_metrics(ctx.settings.run.folder / METRICS), ctx.parallel.cpu_group)
    return MetricGuards(ctx.settings.monitor.guards, [line for line in past if (line["step"] or 0) <= ctx.state.step])


def make_reporter(ctx: PolicyContext) -> Reporter:
    """Make what writes the report of the run; rank 0 does."""
    every = ctx.settings.monitor.report_every if ctx.parallel.rank == 0 else None
    return Reporter(ctx.settings.run.folder, every, ctx.progress.note)


def end_report(ctx: PolicyContext, reporter: Reporter) -> None:
    """Begin the report of all steps, whether the run has done them all or was told to stop."""
    reporter.end(early=ctx.state.step < ctx.settings.run.steps)


def finish_report(ctx: PolicyContext, reporter: Reporter) -> None:
    """Wait for the report; a run that was told to stop, which may soon be killed, waits less."""
    reporter.finish(early=ctx.state.step < ctx.settings.run.steps)


def check_guards(ctx: PolicyContext, guards: MetricGuards, step: int, record: StepRecord) -> None:
    """Warn of metrics outside their limits, or stop: all ranks have the same metrics."""
    for sentence in guards.check(step, record.scalars):
        ctx.progress.note(f"warning: step {step}: {sentence}")


def save(ctx: PolicyContext, logger: StepLogger, last: bool) -> None:
    """Save a checkpoint of the current state; what the next step changes last is written while it runs."""
    with ctx.phases.phase(Phase.SAVE):
        ctx.saver.save(ctx.state, last, before=logger.flush)


def finish_save(ctx: PolicyContext) -> None:
    """Wait until the last checkpoint is complete."""
    with ctx.timeline.span(SAVE_WAIT):
        ctx.saver.finish()


def save_last(ctx: PolicyContext, logger: StepLogger, first_step: int) -> None:
    """Save the state behind the loop, unless that is done; `first_step`: that with which it began.

    Raises DiskError where the disk does not take it: a run that ends says so.
    """
    finish_save(ctx)
    if max(first_step, ctx.saver.saved_step) < ctx.state.step:
        save(ctx, logger, last=True)
        finish_save(ctx)


def export(ctx: PolicyContext, folder: Path) -> None:
    """Write the policy as a Hugging Face folder, and its adapters beside it as one for peft."""
    settings = ctx.settings
    with ctx.phases.phase(Phase.SAVE, "export"):
        if settings.model.lora:
            export_adapters(ctx.policy, adapter_folder(folder), settings.model.path, settings.bucket_bytes)
        export_policy(ctx.policy, folder, settings.model.path, settings.bucket_bytes, settings.run.export_fp8)


def adapter_folder(export: Path) -> Path:
    """Return the folder for peft beside an export."""
    return export.with_name(f"{export.name}_adapter")


def export_step(ctx: PolicyContext, step: int) -> None:
    """Write an export of the run that goes on, and let servers load it."""
    folder = ctx.settings.run.folder / EXPORTS / f"step_{step:06d}"
    try:
        export(ctx, folder)
    except DiskError as error:
        if ctx.parallel.rank == 0:  # nothing stands beside an export that is not there
            for half in (incomplete_folder(adapter_folder(folder)), adapter_folder(folder)):
                rmtree(half, ignore_errors=True)
        ctx.saver.failed_exports.add(error, incomplete_folder(folder), last=False)
    else:
        ctx.saver.failed_exports.forget()
        refresh_servers(ctx, folder)


def refresh_servers(ctx: PolicyContext, folder: Path) -> None:
    """Let the servers of `run.export_servers` load an export."""
    servers = ctx.settings.run.export_servers
    if servers and ctx.parallel.rank == 0:
        with ctx.phases.phase(Phase.SAVE, "export servers"):
            for sentence in load_export(servers, folder):
                ctx.progress.note(f"warning: {sentence}")


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether `step` is the last, or one of those that come `every` steps (0: never)."""
    return step == last or (every > 0 and step % every == 0)
