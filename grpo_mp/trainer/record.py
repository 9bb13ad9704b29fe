"""What a step leaves behind: metrics, sample texts, one line on the screen."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from grpo_mp.evaluation.files import step_file, write_scores
from grpo_mp.evaluation.picture import draw, write_svg
from grpo_mp.evaluation.score import EvalScore
from grpo_mp.monitor.metrics import fill
from grpo_mp.monitor.samples import SampleWriter
from grpo_mp.monitor.summary import StepSummary, over_ranks, step_scalars, summarise
from grpo_mp.monitor.writer import MetricWriter
from grpo_mp.policy.policy import UpdateReport
from grpo_mp.sync.check import CheckReport
from grpo_mp.sync.weight_sync import SyncReport
from grpo_mp.trainer.batch import StepBatch
from grpo_mp.trainer.collect import Collected
from grpo_mp.trainer.metrics import collect_metrics, memory_metrics, rollout_metrics, update_metrics
from grpo_mp.trainer.session import Session
from grpo_mp.types import SampleGroup

PICTURE = "pass_at_k.svg"


class Recorder:
    """Collects one step's numbers over all ranks; rank 0 writes them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        folder, done = session.settings.run.folder, session.state.step
        first = done + 1 if done else 0
        self._writer = MetricWriter(folder, first) if session.is_first else None
        kept = session.settings.monitor.samples_per_step
        self._samples = SampleWriter(folder, self._writer, kept, first) if session.is_first and kept else None
        self._start_ns = session.timeline.now_ns()

    def begin_step(self) -> None:
        """Start the clock of a step."""
        self._session.timeline.take()
        self._start_ns = self._session.timeline.now_ns()

    def end_step(self) -> StepSummary:
        """Stop the clock; the slowest rank's seconds, the mean of the shares. Every rank must call this."""
        timeline, parallel = self._session.timeline, self._session.parallel
        mine = summarise(timeline.take(), self._start_ns, timeline.now_ns())
        everyone: list[StepSummary] = [mine] * parallel.world_size
        dist.all_gather_object(everyone, mine, group=parallel.host)
        return over_ranks(everyone)

    def step_metrics(
        self,
        collected: Collected,
        batch: StepBatch,
        reports: Sequence[UpdateReport],
        sync: SyncReport,
        check: CheckReport,
    ) -> dict[str, float]:
        """All scalars of the step but those of evaluation. Every rank must call this."""
        session, parallel = self._session, self._session.parallel
        summary = self.end_step()
        response_tokens = sum(info.response_tokens for info in collected.launched)
        tokens = sum(info.total_tokens for info in batch.infos)
        seconds = summary.seconds
        updates = update_metrics(reports, batch)
        if session.policy.reference is None:
            updates.pop("train/kl_loss", None)  # nothing was measured
        return {
            # The samples were drawn before this step's updates moved the version on.
            **rollout_metrics(collected.scored, sync.version - len(reports)),
            **collect_metrics(collected),
            **updates,
            **{fill("train/control/{name}", name=name): value for name, value in session.state.controls.items()},
            **memory_metrics(session.scheduler.ledger.take(), parallel),
            **step_scalars(summary),
            "reward/failures": float(sum(session.inputs.scorer.errors.values())),
            "speed/generate_tokens_per_s": response_tokens / seconds["GENERATE"],
            "speed/train_tokens_per_s": tokens / seconds["TRAIN"],
            "speed/samples_per_s": len(collected.launched) / summary.wall_s,
            "speed/tokens_per_s_per_gpu": tokens / summary.wall_s / parallel.world_size,
            **self.sync_metrics(sync, check),
        }

    def sync_metrics(self, sync: SyncReport, check: CheckReport) -> dict[str, float]:
        """What the last sync moved, and how far the engines are from the policy after it."""
        return {
            "sync/weight_version": sync.version,
            "sync/bytes": sync.nbytes,
            "sync/buckets": sync.buckets,
            "sync/bytes_per_s": sync.nbytes / sync.seconds,
            "sync/check/logprob_abs_diff/mean": check.mean,
            "sync/check/logprob_abs_diff/max": check.largest,
            "sync/check/tokens": check.tokens,
        }

    def write(self, step: int, scalars: Mapping[str, float], groups: Sequence[SampleGroup] = ()) -> None:
        """Write a step's scalars, and texts of the groups that rank 0's engine generated."""
        if self._writer:
            self._writer.scalars(step, scalars)
            self._write_distributions(step, groups)

    def evaluated(self, step: int, before: Mapping[str, EvalScore], now: Mapping[str, EvalScore]) -> None:
        """Show and keep the scores that the run has after a step, and draw them beside those before training."""
        if not (self._writer and now):
            return
        self._session.progress.evaluated(step, now)
        folder = self._session.settings.run.folder
        write_scores(step_file(folder, step), now, step=step)
        figure = draw(before if step else {}, now)
        if figure:
            write_svg(figure, folder / PICTURE)
            self._writer.image(step, "eval/pass_at_k", figure)

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _write_distributions(self, step: int, groups: Sequence[SampleGroup]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        if not samples or not self._writer:
            return
        self._writer.histogram(step, "reward/values", [sample.reward for sample in samples])
        self._writer.histogram(step, "rollout/response_length/values", [len(sample.tokens) for sample in samples])
        if self._samples:
            self._samples.write(step, list(groups))
