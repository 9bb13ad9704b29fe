"""Log a step: metrics, histograms, sample texts, evaluation scores."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.evaluation import EvalScore, plot_pass_at_k, step_file, write_scores, write_svg
from grpo_mp.batching.exchange import gather_groups
from grpo_mp.batching.step_batch import StepBatch
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.distributed.process_groups import Parallel, all_gather
from grpo_mp.monitor.loggers import Logger, write_metrics
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.rules import RuleWatch
from grpo_mp.monitor.samples import evenly_spaced, samples_to_markdown, write_eval_samples, write_samples
from grpo_mp.monitor.timeline import StepSummary, Timeline, reduce_over_ranks, step_scalars, summarize
from grpo_mp.policy.expert_load import ExpertLoad, load_ratios, max_load_ratio
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.critic_metrics import critic_metrics
from grpo_mp.trainer.evaluation import Evaluation
from grpo_mp.trainer.generation_times import slowest_rank_ratio
from grpo_mp.trainer.memory import MemoryTracker
from grpo_mp.trainer.metrics import (
    collect_metrics,
    distillation_metrics,
    distributions,
    logprob_tokens,
    memory_metrics,
    packed_tokens,
    reward_metrics,
    rollout_metrics,
    update_metrics,
)
from grpo_mp.utils.errors import DISK_ERRORS, one_line
from grpo_mp.utils.types import MicroBatch, SampleGroup
from grpo_mp.weight_sync.compare import CheckReport
from grpo_mp.weight_sync.update import SyncReport

PASS_AT_K_FILE = "pass_at_k.svg"
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """What is logged of one step, under names of the metric dictionary; the same on every rank, except `groups`."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Sequence[float] | torch.Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    groups: Sequence[SampleGroup] = ()  # for the sample files; on rank 0 only


class StepLogger:
    """Collects the numbers of each step over all ranks; rank 0 writes them."""

    def __init__(
        self,
        run_folder: Path,
        epochs: int,
        samples_per_step: int,
        parallel: Parallel,
        timeline: Timeline,
        progress: Progress,
        loggers: Sequence[Logger],
        memory_tracker: MemoryTracker,
        expert_load: ExpertLoad,
        watch: RuleWatch,
        distillation: DistillationConfig | None = None,
    ) -> None:
        """Take the open `loggers` of rank 0; `samples_per_step`: groups whose texts are written.

        `watch` has seen the steps that are done.
        """
        self._folder, self._epochs, self._samples_per_step = run_folder, epochs, samples_per_step
        self._parallel, self._timeline, self._progress = parallel, timeline, progress
        self._loggers = loggers
        self._memory_tracker, self._expert_load = memory_tracker, expert_load
        self._watch, self._reported_failures = watch, set[str]()
        self._start_ns, self._distillation = timeline.now_ns(), distillation

    def begin_step(self) -> None:
        """Start the clock of a step."""
        self._timeline.take()
        self._start_ns = self._timeline.now_ns()

    def step_record(
        self,
        state: TrainState,
        rollouts: RolloutBatch,
        batch: StepBatch,
        updates: Sequence[Sequence[MicroBatch]],
        reports: Sequence[UpdateReport],
        critic_reports: Sequence[UpdateReport],
        synced: Mapping[str, float],
    ) -> StepRecord:
        """Collect all of the step but its evaluation. Every rank must call this.

        `state` is that after the step; `synced`: metrics of the weight sync.
        """
        summaries, summary, common = self.common_record()
        logprob_token_count = logprob_tokens(updates, self._parallel)
        stats = rollouts.reward_stats
        for term, sentence in stats.first_errors.items():
            if term not in self._reported_failures:  # noted once, where a failing reward does not stop the run
                self._progress.note(f"warning: {sentence}")
        self._reported_failures |= stats.first_errors.keys()
        scalars = common.scalars | {
            # The samples were drawn before this step's updates, each of which raises the version by 1.
            **rollout_metrics(rollouts.scored, state.optimizer_step - len(reports)),
            **reward_metrics(stats),
            **collect_metrics(rollouts),
            **update_metrics(reports, batch, len(batch.plan) * self._epochs),
            **critic_metrics(critic_reports, updates, self._parallel),
            **distillation_metrics(updates, self._distillation, self._parallel),
            **{
                metric_name("train/adaptive_coef/{name}", name=name): value
                for name, value in state.adaptive_coefs.items()
            },
            "train/optimizer_step": state.optimizer_step,
            "train/samples_seen": state.samples_seen,
            **self._speed_metrics(rollouts, batch, summary, logprob_token_count),
            **rank_metrics(summaries if logprob_token_count else ()),
            **synced,
        }
        histograms = {**distributions(rollouts.scored, batch.advantages)} | common.histograms
        texts = dict(common.texts)
        if groups := self._gather_samples(rollouts):
            texts["rollout/samples"] = samples_to_markdown(groups)
        return StepRecord(scalars, histograms, texts=texts, groups=groups)

    def _gather_samples(self, rollouts: RolloutBatch) -> list[SampleGroup]:
        """Gather some groups of the step on rank 0."""
        if not self._samples_per_step:
            return []
        ids = evenly_spaced(sorted({info.group_id for info in rollouts.infos}), self._samples_per_step)
        return gather_groups(rollouts.groups, set(ids), self._parallel.cpu_group)

    def common_record(self) -> tuple[Sequence[StepSummary], StepSummary, StepRecord]:
        """Return the times of the step on each rank and over all, and what is logged of any step.

        That is times, memory, the load of experts. Every rank must call this.
        """
        own_summary = summarize(self._timeline.take(), self._start_ns, self._timeline.now_ns())
        summaries = all_gather(own_summary, self._parallel.cpu_group)
        summary = reduce_over_ranks(summaries)
        record = StepRecord({**memory_metrics(self._memory_tracker.take(), self._parallel), **step_scalars(summary)})
        load = self._expert_load.take(self._parallel.cpu_group)
        if load is not None and (max_load := max_load_ratio(load)) is not None:
            record.scalars["train/expert_load/max_over_mean"] = max_load
            record.histograms["train/expert_load/values"] = load_ratios(load)
        return summaries, summary, record

    def write(self, step: int, record: StepRecord) -> None:
        """Write a step, and note on the screen what the rules find in it that they did not before."""
        if self._parallel.rank:
            return
        write_metrics(self._loggers, step, scalars=record.scalars, histograms=record.histograms, texts=record.texts)
        if record.groups:
            with disk_may_be_full(f"the samples of step {step}"):
                write_samples(self._folder, step, record.groups)
        for finding in self._watch.step({"step": step, **record.scalars}):
            self._progress.note(f"warning: step {step}: {finding.sentence}. {finding.advice}")

    def write_scores(self, step: int, initial: Mapping[str, EvalScore], evaluation: Evaluation) -> None:
        """Show and write scores and answers after a step; draw the scores beside the initial, those before training."""
        scores = evaluation.scores
        if self._parallel.rank or not scores:
            return
        self._progress.print_eval(step, scores)
        figure = plot_pass_at_k(initial if step else {}, scores)
        with disk_may_be_full(f"the scores of step {step}"):
            write_scores(step_file(self._folder, step), scores, step=step)
            if evaluation.shown:
                write_eval_samples(self._folder, step, evaluation.shown)
            if figure:
                write_svg(figure, self._folder / PASS_AT_K_FILE)
        if figure:
            for logger in self._loggers:
                logger.image(step, "eval/pass_at_k", figure)

    def flush(self) -> None:
        """Bring to disk what a checkpoint counts on. Raises OSError where that fails."""
        for logger in self._loggers:
            logger.flush()

    def close(self) -> None:
        """Close the metric files."""
        for logger in self._loggers:
            logger.close()

    def _speed_metrics(
        self, rollouts: RolloutBatch, batch: StepBatch, summary: StepSummary, logprob_token_count: float
    ) -> dict[str, float]:
        tokens, seconds = sum(info.total_tokens for info in batch.infos), summary.seconds
        launched_tokens = sum(info.response_tokens for info in rollouts.launched)
        response_tokens = max(0, launched_tokens - rollouts.recorded_tokens)
        # Where engines have ranks of their own, they generate all the time; in a replay none does.
        generate_s = summary.wall_s if self._parallel.job.engine_ranks else seconds.get("GENERATE")
        return {
            **({"speed/generate_tokens_per_s": response_tokens / generate_s} if generate_s else {}),
            "speed/train_tokens_per_s": packed_tokens(batch) / seconds["TRAIN"],
            **({"speed/logprob_tokens_per_s": logprob_token_count / seconds["LOGPROB"]} if logprob_token_count else {}),
            "speed/samples_per_s": len(rollouts.launched) / summary.wall_s,
            "speed/tokens_per_s_per_gpu": tokens / summary.wall_s / self._parallel.job.world_size,
        }


def rank_metrics(summaries: Sequence[StepSummary]) -> dict[str, float]:
    """Return how much longer than the median rank the slowest takes for logprobs, which it computes by itself."""
    seconds = [summary.seconds["LOGPROB"] for summary in summaries]
    return {"time/slowest_rank_ratio": slowest_rank_ratio(seconds)} if seconds else {}


@contextmanager
def disk_may_be_full(what: str) -> Iterator[None]:
    """Go on where the disk does not take what the body writes: it is missing then, with a warning."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        LOGGER.warning("%s are not written: %s", what, one_line(error))


def sync_metrics(sync: SyncReport, check: CheckReport) -> dict[str, float]:
    """Return what the last sync moved, and how far the engines are from the policy after it, where one was there."""
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
        "sync/largest_round_bytes": sync.largest_round,
        "sync/bytes_per_s": sync.staged / sync.seconds,
        **(distance if check.tokens else {}),
        "sync/check/tokens": check.tokens,
    }
