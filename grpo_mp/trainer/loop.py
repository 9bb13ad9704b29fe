"""Work after each step of RL or supervised fine-tuning: logs, guards, exports, checkpoints."""

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.run_state import EXPORTS, FINAL, METRICS
from grpo_mp.config.sections import RunConfig
from grpo_mp.distributed.process_groups import Parallel, all_gather, broadcast
from grpo_mp.monitor.guards import MetricGuards
from grpo_mp.monitor.loggers import MakeLogger
from grpo_mp.monitor.reporter import EARLY_LIMIT_S, LIMIT_S, write_report
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.monitor.timeline import merge_traces
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.trained_model import LOSS_SCALE, UpdateReport
from grpo_mp.trainer.job import RunContext
from grpo_mp.trainer.save import CheckpointSaver, export_adapters, export_policy
from grpo_mp.trainer.step_logger import StepLogger, StepRecord
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.utils.phases import SAVE_WAIT, Phase

SHOWN_PARAMETERS = 3  # names in a message
MAX_SKIPPED_UPDATES = 3  # in a row: the policy has diverged, and further steps would only cost time


@dataclass(kw_only=True)
class PolicyContext(RunContext):
    """Context of a training rank, and the work around its steps: logs, guards, exports, checkpoints."""

    parallel: Parallel
    policy: Policy
    critic: Critic | None
    saver: CheckpointSaver
    _logger: StepLogger = field(init=False)
    _guards: MetricGuards = field(init=False)
    _first_step: int = field(init=False)

    def open_logger(
        self, settings: Mapping[str, Any], make_loggers: Sequence[MakeLogger], **of_samples: Any
    ) -> StepLogger:
        """Open the loggers; a resumed run appends to the records of its finished steps. `settings`: for the loggers."""
        parts = self.parallel, self.timeline, self.progress, self.phases.memory_tracker, self.policy.expert_load
        logger = StepLogger(self.settings.run.folder, *parts, **of_samples)
        logger.open(make_loggers, self.state.step + 1 if self.state.step else 0, settings)
        return logger

    @contextmanager
    def reporting(self, logger: StepLogger) -> Iterator[None]:
        """Log the steps of the body and report them at the end, also if the body raises."""
        monitor = self.settings.monitor
        folder = self.settings.run.folder
        past = broadcast(read_metrics(folder / METRICS), self.parallel.cpu_group)
        self._first_step = self.state.step
        self._logger = logger
        self._guards = MetricGuards(monitor.guards, [line for line in past if (line["step"] or 0) <= self.state.step])
        try:
            yield
        except Exception:
            atexit.register(self._report, EARLY_LIMIT_S)  # at the exit, so that the error is printed first
            raise
        self._report(LIMIT_S if self.is_done else EARLY_LIMIT_S)

    def _report(self, limit_s: float) -> None:
        """Write the run's report on rank 0, if steps were logged."""
        metrics = self.settings.run.folder / METRICS
        if self.parallel.rank or not self.settings.monitor.report or not metrics.exists() or not metrics.stat().st_size:
            return
        if warning := write_report(self.settings.run.folder, limit_s):
            self.progress.note(f"warning: {warning}")

    @property
    def is_done(self) -> bool:
        return self.state.step >= self.settings.run.steps

    def steps(self) -> Iterator[int]:
        """Yield the number of each step, until the last step or a stop request."""
        while not self.is_done and not self.should_stop():
            self._logger.begin_step()
            yield self.state.step + 1

    def end_step(self, step: int, record: StepRecord, accuracy: float | None = None) -> None:
        """Log a step, check the guards, and export and save when due; raise EarlyStopError if a guard stops the run."""
        run = self.settings.run
        self._logger.write(step, record)
        self.progress.step(step, record.scalars, accuracy)
        self._guards.check(step, record.scalars)
        if run.export_every and step % run.export_every == 0:
            # Export before the save, so that a run that resumes from the checkpoint has the export.
            self._export(run.folder / EXPORTS / f"step_{step:06d}")
        if is_due(step, run.save_every, run):
            self._save()

    def end(self) -> None:
        """Write the last checkpoint, if it is missing, and close the loggers."""
        self.finish_save()
        if max(self._first_step, self.saver.saved_step) < self.state.step:
            self._save()
            self.finish_save()
        self._logger.close()

    def finish(self) -> bool:
        """Export the model and merge the traces if all steps are done; return whether they are."""
        run = self.settings.run
        if not self.is_done:
            self.progress.note(f"stopped after step {self.state.step}: run the same command to resume")
            return False
        if run.export:
            self._export(run.folder / FINAL)
        if self.parallel.rank == 0:
            merge_traces(run.folder)
        return True

    def finish_save(self) -> None:
        """Wait for the checkpoint written in the background: an update would change its weights."""
        with self.timeline.span(SAVE_WAIT):
            self.saver.finish()

    def note_skipped(self, reports: Sequence[UpdateReport], step: int, model: str = "") -> int:
        """Warn of a step's skipped updates; return the number of consecutive skipped updates at the end of the step.

        `model`: "" for the policy, or "critic". Raises EarlyStopError at MAX_SKIPPED_UPDATES in a row. An update that
        overflowed at a loss scale which is lowered for the next one is not counted.
        """
        skipped = [report for report in reports if report.skipped]
        if not skipped:
            return 0
        count = self.state.critic_skipped_in_a_row if model else self.state.skipped_in_a_row
        counts = list(accumulate(reports, lambda n, one: (n + (not one.lowers_scale)) * one.skipped, initial=count))[1:]
        own = {name for report in skipped for name in report.bad_gradients}
        names = sorted(set().union(*all_gather(own, self.parallel.cpu_group)))
        text = (
            f"step {step}: update{f' of the {model}' if model else ''} skipped, {max(counts)} in a row: gradient norm "
            f"{', '.join(f'{report.grad_norm:.3g}' for report in skipped)}"
        )
        if names:
            more = f" and {len(names) - SHOWN_PARAMETERS} more" if len(names) > SHOWN_PARAMETERS else ""
            text += f", not finite in {', '.join(names[:SHOWN_PARAMETERS])}{more}"
        if lowered := [report.measured[LOSS_SCALE] for report in skipped if report.lowers_scale]:
            text += f"; loss scale lowered from {lowered[0]:g}"
        if max(counts) >= MAX_SKIPPED_UPDATES:
            remedy = f"lower {model or 'optimizer'}.lr, or look at the samples (rollout.dump=true writes all of them)"
            raise EarlyStopError(f"{text}; the run stops after {MAX_SKIPPED_UPDATES} skipped updates: {remedy}")
        self.progress.note(f"warning: {text}")
        return counts[-1]

    def _save(self) -> None:
        with self.phases.phase(Phase.SAVE):
            self.saver.save(self.state, before=self._logger.flush)

    def _export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder and, with LoRA, its adapters as a peft folder beside it."""
        model = self.settings.model
        bucket_bytes = self.settings.bucket_bytes
        with self.phases.phase(Phase.SAVE, "export"):
            if model.lora:
                adapters = folder.with_name(f"{folder.name}_adapter")
                export_adapters(self.policy, adapters, model.path, bucket_bytes)
            export_policy(self.policy, folder, model.path, bucket_bytes, self.settings.run.exports_fp8)


def is_due(step: int, every: int, run: RunConfig) -> bool:
    """Return whether `step` is the run's last, or a multiple of `every` (0: never)."""
    return step == run.steps or (every > 0 and step % every == 0)
