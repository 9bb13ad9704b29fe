"""Held-out prompts, one sample each at the rollout's own temperature."""

from dataclasses import dataclass, field

from grpo_mp.monitor.metrics import fill
from grpo_mp.monitor.samples import markdown, spread
from grpo_mp.monitor.screen import AnswerPair, EvalScore
from grpo_mp.rollout.exchange import SampleInfo, bring_groups, share_infos
from grpo_mp.scheduler.phases import Phase
from grpo_mp.trainer.metrics import eval_metrics, eval_score, total_tally
from grpo_mp.trainer.session import Session
from grpo_mp.types import SampleGroup


@dataclass(frozen=True)
class Evaluation:
    """Scores by set, their metrics, and the answers that this rank's engine gave."""

    scores: dict[str, EvalScore] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # some answers to each set, as Markdown; on rank 0 only
    answers: dict[str, str] = field(default_factory=dict)  # question -> answer, of the first set


def evaluate(session: Session, step: int) -> Evaluation:
    """Evaluate every set. Every rank must call this; scores and metrics are the same on all."""
    result = Evaluation()
    for name, prompts in session.inputs.evals.items():
        with session.scheduler.phase(Phase.EVAL, name):
            groups = session.rollout.evaluate(prompts.prompts, name, step, session.parallel.store)
            infos: list[SampleInfo] = share_infos(groups, session.parallel.host)
        tally = total_tally(session.inputs.scorer.take_tally(), session.parallel)
        result.scores[name] = eval_score(infos)
        result.metrics.update(eval_metrics(name, infos, tally))
        result.texts.update(_some_answers(session, name, groups, infos))
        result.answers.update(_answers(groups))
    if result.scores:
        session.progress.evaluated(step, result.scores)
    return result


def answer_pairs(session: Session, before: Evaluation, after: Evaluation, count: int = 2) -> list[AnswerPair]:
    """Questions that this rank's engine answered before and after, a changed answer first."""
    expected = {prompt.text: prompt.answer for prompts in session.inputs.evals.values() for prompt in prompts}
    both = sorted(
        before.answers.keys() & after.answers.keys(), key=lambda q: (before.answers[q] == after.answers[q], q)
    )
    return [AnswerPair(q, before.answers[q], after.answers[q], expected.get(q)) for q in both[:count]]


def _some_answers(session: Session, name: str, groups: list[SampleGroup], infos: list[SampleInfo]) -> dict[str, str]:
    """Answers to some questions of the set, the same questions each time, under their metric name."""
    kept = session.settings.monitor.samples_per_step
    chosen = spread(sorted({info.group_id for info in infos}), kept) if kept else []
    shown = bring_groups(groups, chosen, session.parallel.host)
    return {fill("eval/{set}/samples", set=name): markdown(shown)} if shown else {}


def _answers(groups: list[SampleGroup]) -> dict[str, str]:
    return {group.prompt.text: group.samples[0].text for group in groups}
