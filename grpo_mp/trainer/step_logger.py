"""What a step leaves behind: metrics, histograms, sample texts, one line on the screen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from grpo_mp.batching.exchange import gather_groups
from grpo_mp.batching.step_batch import StepBatch
from grpo_mp.evaluation.files import step_file, write_scores
from grpo_mp.evaluation.plot import plot_pass_at_k, write_svg
from grpo_mp.evaluation.score import EvalScore
from grpo_mp.monitor.metrics import RangeWatch, fill
from grpo_mp.monitor.samples import SampleWriter, spread
from grpo_mp.monitor.summary import StepSummary, over_ranks, step_scalars, summarise
from grpo_mp.monitor.writer import MetricWriter
from grpo_mp.policy.expert_load import heat_map, over_mean, worst_ratio
from grpo_mp.policy.policy import UpdateReport
from grpo_mp.rewards.tally import Tally
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.context import TrainContext
from grpo_mp.trainer.metrics import (
    collect_metrics,
    distributions,
    logprob_tokens,
    memory_metrics,
    reward_metrics,
    rollout_metrics,
    total_tally,
    update_metrics,
)
from grpo_mp.types import MicroBatch, SampleGroup
from grpo_mp.weight_sync.compare import CheckReport
from grpo_mp.weight_sync.update import SyncReport


@dataclass(frozen=True)
class StepRecord:
    """What is written of one step, under names of the metric dictionary. The same on every rank, but for `groups`."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Sequence[float] | torch.Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    groups: Sequence[SampleGroup] = ()  # for the sample files; on rank 0 only


PICTURE = "pass_at_k.svg"


class StepLogger:
    """Collects one step's numbers over all ranks; rank 0 writes them."""

    def __init__(self, session: TrainContext) -> None:
        self._session = session
        folder, done = session.settings.run.folder, session.state.step
        first = done + 1 if done else 0
        self._writer = MetricWriter(folder, first) if session.is_first else None
        self._kept = session.settings.monitor.samples_per_step
        self._samples = SampleWriter(folder, self._writer, 0, first) if session.is_first and self._kept else None
        self._ranges, self._complained = RangeWatch(), set[str]()
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
        dist.all_gather_object(everyone, mine, group=parallel.cpu_group)
        return over_ranks(everyone)

    def step_record(
        self,
        collected: RolloutBatch,
        batch: StepBatch,
        updates: Sequence[Sequence[MicroBatch]],
        reports: Sequence[UpdateReport],
        sync: tuple[SyncReport, CheckReport],
    ) -> StepRecord:
        """All of the step but its evaluation. Every rank must call this."""
        session, parallel = self._session, self._session.parallel
        summary = self.end_step()
        tally = total_tally(session.inputs.scorer.take_tally(), parallel)
        self._complain(tally)
        scalars = {
            # The samples were drawn before this step's updates moved the version on.
            **rollout_metrics(collected.scored, sync[0].version - len(reports)),
            **reward_metrics(tally),
            **collect_metrics(collected),
            **update_metrics(reports, batch, len(batch.plan) * session.settings.optimizer.epochs),
            **{fill("train/control/{name}", name=name): value for name, value in session.state.controls.items()},
            "train/optimizer_step": session.state.optimizer_step,
            "train/samples_seen": session.state.samples_seen,
            **memory_metrics(session.scheduler.ledger.take(), parallel),
            **step_scalars(summary),
            **self._speed(collected, batch, summary, logprob_tokens(updates, parallel)),
            **self.sync_metrics(*sync),
        }
        histograms: dict[str, Sequence[float] | torch.Tensor] = {
            **distributions(collected.scored, batch.advantages),
        }
        texts: dict[str, str] = {}
        load = session.policy.expert_load.take(parallel.cpu_group)
        if load is not None and (worst := worst_ratio(load)) is not None:
            scalars["train/expert_load/max_over_mean"] = worst
            histograms["train/expert_load/values"] = over_mean(load)
            texts["train/expert_load/by_layer"] = heat_map(load)
        return StepRecord(scalars, histograms, texts, self._shown(collected))

    def sync_metrics(self, sync: SyncReport, check: CheckReport) -> dict[str, float]:
        """What the last sync moved, and how far the engines are from the policy after it."""
        return {
            "sync/weight_version": sync.version,
            "sync/bytes": sync.nbytes,
            "sync/buckets": sync.buckets,
            "sync/largest_bucket_bytes": sync.largest_bucket,
            "sync/bytes_per_s": sync.nbytes / sync.seconds,
            "sync/check/logprob_abs_diff/mean": check.mean,
            "sync/check/logprob_abs_diff/max": check.largest,
            "sync/check/tokens": check.tokens,
        }

    def write(self, step: int, record: StepRecord) -> None:
        """Write a step, and tell on the screen of metrics that left their healthy range."""
        if not self._writer:
            return
        self._writer.scalars(step, record.scalars)
        for name, values in record.histograms.items():
            self._writer.histogram(step, name, values)
        for name, text in record.texts.items():
            self._writer.text(step, name, text)
        if self._samples and record.groups:
            self._samples.write(step, record.groups)
        for sentence in self._ranges.news(record.scalars):
            self._session.progress.note(f"step {step}: {sentence}")

    def evaluated(self, step: int, before: Mapping[str, EvalScore], now: Mapping[str, EvalScore]) -> None:
        """Show and keep the scores that the run has after a step, and draw them beside those before training."""
        if not (self._writer and now):
            return
        self._session.progress.evaluated(step, now)
        folder = self._session.settings.run.folder
        write_scores(step_file(folder, step), now, step=step)
        figure = plot_pass_at_k(before if step else {}, now)
        if figure:
            write_svg(figure, folder / PICTURE)
            self._writer.image(step, "eval/pass_at_k", figure)

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _speed(
        self, collected: RolloutBatch, batch: StepBatch, summary: StepSummary, fixed_tokens: float
    ) -> dict[str, float]:
        tokens, seconds = sum(info.total_tokens for info in batch.infos), summary.seconds
        response_tokens = sum(info.response_tokens for info in collected.launched)
        ranks = self._session.parallel.world_size
        return {
            "speed/generate_tokens_per_s": response_tokens / seconds["GENERATE"],
            "speed/train_tokens_per_s": tokens / seconds["TRAIN"],
            **({"speed/logprob_tokens_per_s": fixed_tokens / seconds["LOGPROB"]} if fixed_tokens else {}),
            "speed/samples_per_s": len(collected.launched) / summary.wall_s,
            "speed/tokens_per_s_per_gpu": tokens / summary.wall_s / ranks,
        }

    def _shown(self, collected: RolloutBatch) -> list[SampleGroup]:
        """Some groups of the step, whatever rank's engine generated them. Every rank must call this."""
        if not self._kept:
            return []
        ids = sorted({info.group_id for info in collected.infos})
        return gather_groups(collected.groups, spread(ids, self._kept), self._session.parallel.cpu_group)

    def _complain(self, tally: Tally) -> None:
        """Say of each part of the reward once how it failed, where a failing call does not stop the run."""
        for part, sentence in tally.complaints.items():
            if part not in self._complained:
                self._session.progress.note(f"warning: {sentence}")
        self._complained |= tally.complaints.keys()
