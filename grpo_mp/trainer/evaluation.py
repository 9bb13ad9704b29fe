"""Held-out problems: the engines answer, rewards judge, every rank knows the scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from grpo_mp.batching.exchange import all_gather_sample_info, gather_groups
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.evaluation.files import read_scores, step_file
from grpo_mp.evaluation.score import EvalScore, Votes, score
from grpo_mp.monitor.metrics import fill
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.samples import markdown, spread
from grpo_mp.monitor.screen import AnswerPair
from grpo_mp.phases import Phase
from grpo_mp.rewards.score import Scorer
from grpo_mp.rewards.tally import Tally
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.trainer.context import TrainContext
from grpo_mp.trainer.metrics import eval_metrics, eval_reward_metrics, total_tally
from grpo_mp.trainer.preflight import Inputs
from grpo_mp.types import SampleGroup, SampleInfo

Keep = Callable[[str, Sequence[SampleGroup]], None]


class Engines(Protocol):
    """What an evaluation needs of a running job: a training session has it, and engines without a policy."""

    @property
    def settings(self) -> Settings: ...
    @property
    def inputs(self) -> Inputs: ...
    @property
    def parallel(self) -> Parallel: ...
    @property
    def rollout(self) -> Rollout: ...
    @property
    def scheduler(self) -> PhaseManager: ...
    @property
    def progress(self) -> Progress: ...


@dataclass(frozen=True)
class Evaluation:
    """Scores by set, their metrics, and the answers that this rank's engine gave."""

    scores: dict[str, EvalScore] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # some answers to each set, as Markdown; on rank 0 only
    answers: dict[str, str] = field(default_factory=dict)  # question -> its first answer
    tallies: dict[str, Tally] = field(default_factory=dict)  # what the rewards met, over all ranks


def evaluate(session: Engines, step: int, keep: Keep | None = None) -> Evaluation:
    """Evaluate every set as `data.eval` says. Every rank must call this; scores and metrics are the same on all.

    `keep` gets each set's name and the groups of this rank's engine.
    """
    result, group = Evaluation(), session.parallel.cpu_group
    for name, prompts in session.inputs.evals.items():
        with session.scheduler.phase(Phase.EVAL, name):
            groups = session.rollout.evaluate(prompts.prompts, name, step, session.parallel.store)
            infos: list[SampleInfo] = all_gather_sample_info(groups, group)
            votes = _share_votes(groups, session.inputs.scorer, group) if session.inputs.scorer.has_answers else None
        tally = total_tally(session.inputs.scorer.take_tally(), session.parallel)
        result.tallies[name] = tally
        for sentence in tally.complaints.values():
            session.progress.note(f"warning: {name}: {sentence}")
        result.scores[name] = score(infos, votes)
        result.metrics.update(eval_metrics(name, result.scores[name]))
        result.metrics.update(eval_reward_metrics(name, tally))
        result.texts.update(_some_answers(session, name, groups, infos))
        result.answers.update(_answers(groups))
        if keep:
            keep(name, groups)
    return result


def before_training(session: TrainContext, now: Evaluation) -> dict[str, EvalScore]:
    """The scores before the first step: `now`, or what an earlier start of this run found and left in its folder."""
    file = step_file(session.settings.run.folder, 0)
    return read_scores(file) if session.state.step and session.is_first and file.exists() else now.scores


def answer_pairs(session: TrainContext, before: Evaluation, after: Evaluation, count: int = 2) -> list[AnswerPair]:
    """Questions that this rank's engine answered before and after, a changed answer first."""
    expected = {prompt.text: prompt.answer for prompts in session.inputs.evals.values() for prompt in prompts}
    both = sorted(
        before.answers.keys() & after.answers.keys(), key=lambda q: (before.answers[q] == after.answers[q], q)
    )
    return [AnswerPair(q, before.answers[q], after.answers[q], expected.get(q)) for q in both[:count]]


def _some_answers(session: Engines, name: str, groups: list[SampleGroup], infos: list[SampleInfo]) -> dict[str, str]:
    """Answers to some questions of the set, the same questions each time, under their metric name."""
    kept = session.settings.monitor.samples_per_step
    chosen = spread(sorted({info.group_id for info in infos}), kept) if kept else []
    shown = gather_groups(groups, chosen, session.parallel.cpu_group)
    return {fill("eval/{set}/samples", set=name): markdown(shown)} if shown else {}


def _answers(groups: list[SampleGroup]) -> dict[str, str]:
    return {group.prompt.text: group.samples[0].text for group in groups}


def _share_votes(groups: Sequence[SampleGroup], scorer: Scorer, group: dist.ProcessGroup) -> Votes:
    """Which answer each sample of the job gave, the same on every rank."""
    mine = {
        (sample.group_id, sample.index): number
        for one in groups
        for sample, number in zip(one.samples, scorer.answer_numbers(one), strict=True)
    }
    everyone: list[Votes] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return {key: number for votes in everyone for key, number in votes.items()}
