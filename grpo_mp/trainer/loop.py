"""What the loops of RL and of supervised fine-tuning do alike: guards, skipped updates, checkpoints, exports."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from shutil import rmtree

from grpo_mp.checkpoint.hf_writer import incomplete_folder
from grpo_mp.checkpoint.run_state import EXPORTS, METRICS
from grpo_mp.distributed.process_groups import all_gather, broadcast
from grpo_mp.monitor.guards import MetricGuards
from grpo_mp.monitor.reporter import Reporter
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.context import RolloutContext
from grpo_mp.trainer.job import PolicyContext
from grpo_mp.trainer.save import export_adapters, export_policy
from grpo_mp.trainer.step_logger import StepLogger, sync_metrics
from grpo_mp.utils.errors import DiskError, EarlyStopError
from grpo_mp.utils.phases import SAVE_WAIT, Phase
from grpo_mp.weight_sync.update import largest_report

NAMED = 3  # parameters in a sentence


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


def note_skipped(ctx: PolicyContext, reports: Sequence[UpdateReport], step: int, model: str = "") -> int:
    """Warn of a step's skipped updates; return how many of the last ones, over steps, were skipped in a row.

    `model`: "" for the policy, or "critic". Raises EarlyStopError after `optimizer.max_skipped_updates` in a row.
    """
    if not any(report.skipped for report in reports):
        return 0
    before = ctx.state.critic_skipped_in_a_row if model else ctx.state.skipped_in_a_row
    counts = count_in_a_row(before, reports)
    names = all_gather([name for report in reports for name in report.bad_gradients], ctx.parallel.cpu_group)
    sentence = describe_skipped(reports, sorted(set().union(*names)))
    text = f"step {step}: update{f' of the {model}' if model else ''} skipped, {max(counts)} in a row: {sentence}"
    limit = ctx.settings.optimizer.max_skipped_updates
    if limit and max(counts) >= limit:
        remedy = f"lower {model or 'optimizer'}.lr, or look at the samples (rollout.dump=true writes all of them)"
        raise EarlyStopError(f"{text}; the run stops after optimizer.max_skipped_updates={limit}: {remedy}")
    ctx.progress.note(f"warning: {text}")
    return counts[-1]


def count_in_a_row(before: int, reports: Sequence[UpdateReport]) -> list[int]:
    """Return how many updates were skipped in a row after each of a step's; `before`: before the first."""
    skipped = (report.skipped for report in reports)
    return list(accumulate(skipped, lambda count, is_skipped: count + 1 if is_skipped else 0, initial=before))[1:]


def describe_skipped(reports: Sequence[UpdateReport], names: Sequence[str]) -> str:
    """Return the norms of skipped updates; `names`: parameters whose gradient was not finite."""
    norms = ", ".join(f"{report.grad_norm:.3g}" for report in reports if report.skipped)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"gradient norm {norms}" + (f", not finite in {', '.join(names[:NAMED])}{more}" if names else "")


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


def sync_weights(ctx: RolloutContext, rollouts: RolloutBatch | None = None) -> dict[str, float]:
    """Push the policy's weights into every engine and check that they hold them; return metrics, none in a replay.

    `rollouts`: of the step, on whose answers they are compared, too.
    """
    if not (ctx.weight_sync and ctx.engine_check):
        return {}
    with ctx.phases.phase(Phase.SYNC):
        ctx.state = broadcast(ctx.state, ctx.job.group)  # to ranks that do not train
        if not ctx.settings.updates_running_groups:
            ctx.collector.finish_generation()
        reports = ctx.recovery.update_weights(ctx.weight_sync, ctx.state.optimizer_step)
        ctx.collector.synced_step = ctx.state.step
    groups = rollouts.of_own_engine if rollouts else ()
    check = ctx.engine_check.run(ctx.state.optimizer_step, [group.samples[0] for group in groups])
    if not check.tokens and ctx.recovery.run():  # no engine was left, and one is there again
        check = ctx.engine_check.run(ctx.state.optimizer_step)
    return sync_metrics(largest_report(reports), check)


def export(ctx: PolicyContext, folder: Path) -> None:
    """Write the policy as a Hugging Face folder, and its adapters beside it as one for peft."""
    settings = ctx.settings
    with ctx.phases.phase(Phase.SAVE, "export"):
        if settings.model.lora:
            export_adapters(ctx.policy, adapter_folder(folder), settings.model.path, settings.bucket_bytes)
        export_policy(
            ctx.policy,
            folder,
            like=settings.model.path,
            bucket_bytes=settings.bucket_bytes,
            fp8=settings.run.export_fp8,
        )


def adapter_folder(export: Path) -> Path:
    """Return the folder for peft beside an export."""
    return export.with_name(f"{export.name}_adapter")


def export_step(ctx: PolicyContext, step: int) -> None:
    """Write an export while the run continues; a full disk is a warning."""
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


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether `step` is the last, or one of those that come `every` steps (0: never)."""
    return step == last or (every > 0 and step % every == 0)
