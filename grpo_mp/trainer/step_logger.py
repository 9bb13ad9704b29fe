"""Log a step: metrics, histograms, sample texts, evaluation scores."""

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.batching.exchange import gather_groups
from grpo_mp.batching.step_batch import StepBatch
from grpo_mp.checkpoint.run_state import METRICS, TrainState
from grpo_mp.distributed.process_groups import Parallel, all_gather
from grpo_mp.monitor.evaluation import step_file, write_scores
from grpo_mp.monitor.loggers import Logger, MakeLogger, open_loggers, write_metrics
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.rules import RuleWatch
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.monitor.samples import (
    drop_later_files,
    evenly_spaced,
    samples_to_markdown,
    write_eval_samples,
    write_samples,
)
from grpo_mp.monitor.timeline import StepSummary, Timeline, reduce_over_ranks, step_scalars, summarize
from grpo_mp.policy.routing_replay import ExpertLoad, load_ratios
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.evaluation import Evaluation
from grpo_mp.trainer.metrics import (
    collect_metrics,
    critic_metrics,
    distillation_metrics,
    distributions,
    logprob_tokens,
    memory_metrics,
    packed_tokens,
    reward_metrics,
    rollout_metrics,
    update_metrics,
)
from grpo_mp.trainer.phase_manager import MemoryTracker
from grpo_mp.utils.types import MicroBatch, SampleGroup
from grpo_mp.weight_sync.compare import CheckReport
from grpo_mp.weight_sync.update import SyncReport, largest_report

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """Logged values of a step by name in the metric dictionary; equal on all ranks, except `groups`."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Sequence[float] | torch.Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    groups: Sequence[SampleGroup] = ()  # for the sample files; on rank 0 only


@dataclass(frozen=True)
class StepOutcome:
    """Results of an RL step. `state`: state after the step; `synced`: metrics of the weight sync."""

    state: TrainState
    rollouts: RolloutBatch
    batch: StepBatch
    updates: Sequence[Sequence[MicroBatch]]
    reports: Sequence[UpdateReport]
    critic_reports: Sequence[UpdateReport]
    synced: Mapping[str, float]


@dataclass
class StepLogger:
    """Collects the metrics of each step over all ranks; rank 0 writes them."""

    folder: Path
    parallel: Parallel
    timeline: Timeline
    progress: Progress
    memory_tracker: MemoryTracker
    expert_load: ExpertLoad
    epochs: int = 1
    samples_per_step: int = 0  # groups whose texts are written
    distillation: DistillationConfig | None = None
    loggers: Sequence[Logger] = ()  # empty except on rank 0
    watch: RuleWatch = field(default_factory=RuleWatch)  # has processed the finished steps
    _start_ns: int = 0
    _reported_failures: set[str] = field(default_factory=set)

    def open(self, make_loggers: Sequence[MakeLogger], first_step: int, settings: Mapping[str, Any]) -> None:
        """Open the loggers; remove sample and score files of steps to be repeated. `settings`: for the loggers."""
        if self.parallel.rank:
            return
        drop_later_files(self.folder, first_step)
        self.loggers = open_loggers(make_loggers, self.folder, first_step, settings)
        for line in read_metrics(self.folder / METRICS):
            self.watch.step(line)

    def begin_step(self) -> None:
        self.timeline.take()
        self._start_ns = self.timeline.now_ns()

    def step_record(self, step: StepOutcome) -> StepRecord:
        """Collect the metrics and samples of a step, without its evaluation."""
        summaries, summary, common = self.common_record()
        rollouts = step.rollouts
        batch = step.batch
        updates = step.updates
        logprob_token_count = logprob_tokens(updates, self.parallel)
        stats = rollouts.reward_stats
        for term, sentence in stats.first_errors.items():
            if term not in self._reported_failures:  # show the first error of each reward once
                self.progress.note(f"warning: {sentence}")
        self._reported_failures |= stats.first_errors.keys()
        coefs = {
            metric_name("train/adaptive_coef/{name}", name=name): value
            for name, value in step.state.adaptive_coefs.items()
        }
        scalars = {
            **common.scalars,
            # The samples were drawn before this step's updates, each of which raises the version by 1.
            **rollout_metrics(rollouts.scored, step.state.optimizer_step - len(step.reports)),
            **reward_metrics(stats),
            **collect_metrics(rollouts),
            **update_metrics(step.reports, batch, len(batch.plan) * self.epochs),
            **critic_metrics(step.critic_reports, updates, self.parallel),
            **distillation_metrics(updates, self.distillation, self.parallel),
            **coefs,
            "train/optimizer_step": step.state.optimizer_step,
            "train/samples_seen": step.state.samples_seen,
            **self._speed_metrics(rollouts, batch, summary, logprob_token_count),
            **rank_metrics(summaries if logprob_token_count else ()),
            **step.synced,
        }
        histograms = {**distributions(rollouts.scored, batch.advantages), **common.histograms}
        groups = self._gather_samples(rollouts)
        texts = {"rollout/samples": samples_to_markdown(groups)} if groups else {}
        return StepRecord(scalars, histograms, texts=texts, groups=groups)

    def _gather_samples(self, rollouts: RolloutBatch) -> list[SampleGroup]:
        if not self.samples_per_step:
            return []
        ids = evenly_spaced(sorted({info.group_id for info in rollouts.infos}), self.samples_per_step)
        return gather_groups(rollouts.groups, set(ids), self.parallel.cpu_group)

    def common_record(self) -> tuple[Sequence[StepSummary], StepSummary, StepRecord]:
        """Return the step's times on each rank and over all ranks, and a record of times, memory and expert load."""
        own_summary = summarize(self.timeline.take(), self._start_ns, self.timeline.now_ns())
        summaries = all_gather(own_summary, self.parallel.cpu_group)
        summary = reduce_over_ranks(summaries)
        record = StepRecord({**memory_metrics(self.memory_tracker.take(), self.parallel), **step_scalars(summary)})
        load = self.expert_load.take(self.parallel.cpu_group)
        if load is not None and len(ratios := load_ratios(load)):
            record.scalars["train/expert_load/max_over_mean"] = float(ratios.max())
            record.histograms["train/expert_load/values"] = ratios
        return summaries, summary, record

    def write(self, step: int, record: StepRecord) -> None:
        """Write a step to loggers and sample files, and show new findings of the monitoring rules."""
        if self.parallel.rank:
            return
        write_metrics(self.loggers, step, scalars=record.scalars, histograms=record.histograms, texts=record.texts)
        if record.groups:
            write_samples(self.folder, step, record.groups)
        for finding in self.watch.step({"step": step, **record.scalars}):
            self.progress.note(f"warning: step {step}: {finding.sentence}. {finding.advice}")

    def write_scores(self, step: int, evaluation: Evaluation) -> None:
        """Show and write eval scores and answers of a step."""
        scores = evaluation.scores
        if self.parallel.rank or not scores:
            return
        self.progress.print_eval(step, scores)
        write_scores(step_file(self.folder, step), scores, step=step)
        if evaluation.shown:
            write_eval_samples(self.folder, step, evaluation.shown)

    def flush(self) -> None:
        for logger in self.loggers:
            logger.flush()

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()

    def _speed_metrics(
        self, rollouts: RolloutBatch, batch: StepBatch, summary: StepSummary, logprob_token_count: float
    ) -> dict[str, float]:
        tokens = sum(info.total_tokens for info in batch.infos)
        seconds = summary.seconds
        response_tokens = sum(info.response_tokens for info in rollouts.launched)
        # Engines on separate ranks generate during the whole step; a replay has no GENERATE phase.
        generate_s = summary.wall_s if self.parallel.job.engine_ranks else seconds.get("GENERATE")
        return {
            **({"speed/generate_tokens_per_s": response_tokens / generate_s} if generate_s else {}),
            "speed/train_tokens_per_s": packed_tokens(batch) / seconds["TRAIN"],
            **({"speed/logprob_tokens_per_s": logprob_token_count / seconds["LOGPROB"]} if logprob_token_count else {}),
            "speed/samples_per_s": len(rollouts.launched) / summary.wall_s,
            "speed/tokens_per_s_per_gpu": tokens / summary.wall_s / self.parallel.job.world_size,
        }


def rank_metrics(summaries: Sequence[StepSummary]) -> dict[str, float]:
    """Return slowest / median time of a rank in LOGPROB, a phase in which replicas do not wait for each other."""
    seconds = [summary.seconds["LOGPROB"] for summary in summaries]
    return {"time/slowest_rank_ratio": max(seconds) / statistics.median_low(seconds)} if seconds else {}


def sync_metrics(reports: Sequence[SyncReport], check: CheckReport) -> dict[str, float]:
    """Return the metrics of a weight sync and of the engine check after it. `reports`: of all ranks."""
    sync = largest_report(reports)
    distance = {
        "sync/check/logprob_abs_diff/mean": check.mean,
        "sync/check/logprob_abs_diff/max": check.largest,
        **({"sync/check/limit": check.limit} if check.limit else {}),
    }
    return {
        "sync/weight_version": sync.version,
        "sync/engines": sync.engines,
        "sync/bytes": sync.staged,
        "sync/bytes_sent": sync.sent,
        "sync/rounds": sync.rounds,
        "sync/bytes_per_s": sync.staged / sync.seconds,
        **(distance if check.tokens else {}),
        "sync/check/tokens": check.tokens,
    }
