"""Work after each step of RL or supervised fine-tuning: logs, guards, exports, checkpoints."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from grpo_mp.checkpoint.run_state import EXPORTS, FINAL, METRICS
from grpo_mp.config.sections import RunConfig
from grpo_mp.distributed.process_groups import all_gather, broadcast
from grpo_mp.monitor.guards import MetricGuards
from grpo_mp.monitor.reporter import EARLY_LIMIT_S, LIMIT_S, Reporter
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.monitor.timeline import merge_traces
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.job import PolicyContext
from grpo_mp.trainer.save import export_adapters, export_policy
from grpo_mp.trainer.step_logger import StepLogger, StepRecord
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.utils.phases import SAVE_WAIT, Phase

SHOWN_PARAMETERS = 3  # names in a message
MAX_SKIPPED_UPDATES = 3  # in a row: the policy has diverged, and further steps would only cost time


class TrainingLoop:
    """Context manager around the step loop: counts steps, and logs, checks guards, exports and saves after each step.

    If the loop raises, the report of the finished steps is still written.
    """

    def __init__(self, ctx: PolicyContext, logger: StepLogger) -> None:
        settings, folder = ctx.settings, ctx.settings.run.folder
        self._ctx = ctx
        self._logger = logger
        self._first_step = ctx.state.step
        past = broadcast(read_metrics(folder / METRICS), ctx.parallel.cpu_group)
        done = [line for line in past if (line["step"] or 0) <= ctx.state.step]
        self._guards = MetricGuards(settings.monitor.guards, done)
        every = settings.monitor.report_every if ctx.parallel.rank == 0 else None
        self._reporter = Reporter(folder, every, ctx.progress.note)

    def __enter__(self) -> "TrainingLoop":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._reporter.finish(LIMIT_S if self.is_done else EARLY_LIMIT_S)
        else:
            self._reporter.end_after(error)

    @property
    def is_done(self) -> bool:
        return self._ctx.state.step >= self._ctx.settings.run.steps

    def steps(self) -> Iterator[int]:
        """Yield the number of each step, until the last step or a stop request."""
        while not self.is_done and not self._ctx.should_stop():
            self._logger.begin_step()
            yield self._ctx.state.step + 1

    def end_step(self, step: int, record: StepRecord, accuracy: float | None = None) -> None:
        """Log a step, check the guards, and export and save when due; raise EarlyStopError if a guard stops the run."""
        ctx, run = self._ctx, self._ctx.settings.run
        self._logger.write(step, record)
        ctx.progress.step(step, record.scalars, accuracy)
        self._reporter.step(step)
        self._guards.check(step, record.scalars)
        if run.export_every and step % run.export_every == 0:
            export(
                ctx, run.folder / EXPORTS / f"step_{step:06d}"
            )  # before the save: a run that resumes from it has this export
        if is_due(step, run.save_every, run):
            self._save()

    def end(self) -> None:
        """Write the last report and, if missing, the last checkpoint; close the loggers."""
        self._reporter.end(early=not self.is_done)
        finish_save(self._ctx)
        if max(self._first_step, self._ctx.saver.saved_step) < self._ctx.state.step:
            self._save()
            finish_save(self._ctx)
        self._logger.close()

    def finish(self) -> bool:
        """Export the model and merge the traces if all steps are done; return whether they are."""
        ctx, run = self._ctx, self._ctx.settings.run
        if not self.is_done:
            ctx.progress.note(f"stopped after step {ctx.state.step}: run the same command to resume")
            return False
        if run.export:
            export(ctx, run.folder / FINAL)
        if ctx.parallel.rank == 0:
            merge_traces(run.folder)
        return True

    def _save(self) -> None:
        with self._ctx.phases.phase(Phase.SAVE):
            self._ctx.saver.save(self._ctx.state, before=self._logger.flush)


def is_due(step: int, every: int, run: RunConfig) -> bool:
    """Return whether `step` is the run's last, or a multiple of `every` (0: never)."""
    return step == run.steps or (every > 0 and step % every == 0)


def finish_save(ctx: PolicyContext) -> None:
    """Wait for the checkpoint written in the background: an update would change its weights."""
    with ctx.timeline.span(SAVE_WAIT):
        ctx.saver.finish()


def export(ctx: PolicyContext, folder: Path) -> None:
    """Write the policy as a Hugging Face folder and, with LoRA, its adapters as a peft folder beside it."""
    model, bucket_bytes = ctx.settings.model, ctx.settings.bucket_bytes
    with ctx.phases.phase(Phase.SAVE, "export"):
        if model.lora:
            export_adapters(ctx.policy, adapter_folder(folder), model.path, bucket_bytes)
        export_policy(ctx.policy, folder, model.path, bucket_bytes, ctx.settings.run.exports_fp8)


def adapter_folder(export: Path) -> Path:
    """Return the path of the peft folder beside an export folder."""
    return export.with_name(f"{export.name}_adapter")


def note_skipped(ctx: PolicyContext, reports: Sequence[UpdateReport], step: int, model: str = "") -> int:
    """Warn of a step's skipped updates; return the number of consecutive skipped updates at the end of the step.

    `model`: "" for the policy, or "critic". Raises EarlyStopError at MAX_SKIPPED_UPDATES in a row.
    """
    if not any(report.skipped for report in reports):
        return 0
    before = ctx.state.critic_skipped_in_a_row if model else ctx.state.skipped_in_a_row
    counts = count_in_a_row(before, reports)
    names = all_gather([name for report in reports for name in report.bad_gradients], ctx.parallel.cpu_group)
    sentence = describe_skipped(reports, sorted(set().union(*names)))
    text = f"step {step}: update{f' of the {model}' if model else ''} skipped, {max(counts)} in a row: {sentence}"
    if max(counts) >= MAX_SKIPPED_UPDATES:
        remedy = f"lower {model or 'optimizer'}.lr, or look at the samples (rollout.dump=true writes all of them)"
        raise EarlyStopError(f"{text}; the run stops after {MAX_SKIPPED_UPDATES} skipped updates: {remedy}")
    ctx.progress.note(f"warning: {text}")
    return counts[-1]


def count_in_a_row(before: int, reports: Sequence[UpdateReport]) -> list[int]:
    """Return the number of consecutive skipped updates after each update; `before`: that number before the step."""
    skipped = (report.skipped for report in reports)
    return list(accumulate(skipped, lambda count, is_skipped: count + 1 if is_skipped else 0, initial=before))[1:]


def describe_skipped(reports: Sequence[UpdateReport], names: Sequence[str]) -> str:
    """Return a phrase on the gradients of skipped updates. `names`: parameters with non-finite gradients."""
    norms = ", ".join(f"{report.grad_norm:.3g}" for report in reports if report.skipped)
    more = f" and {len(names) - SHOWN_PARAMETERS} more" if len(names) > SHOWN_PARAMETERS else ""
    return f"gradient norm {norms}" + (f", not finite in {', '.join(names[:SHOWN_PARAMETERS])}{more}" if names else "")
