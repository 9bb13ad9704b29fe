"""Evaluation on held-out problems: engines generate answers, rewards score them, every rank gets the scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch.distributed as dist

from grpo_mp.batching.exchange import all_gather_sample_info, gather_groups
from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.config.data_sections import EvalSetConfig
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.peers import watching_peers
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.monitor.evaluation import EvalScore, Votes, score_eval_set
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.monitor.samples import SHOWN_SAMPLES, evenly_spaced, samples_to_markdown
from grpo_mp.rewards.scorer import RewardStats, Scorer, sum_stats
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.trainer.engines import Engines
from grpo_mp.trainer.metrics import eval_metrics, eval_reward_metrics
from grpo_mp.utils.phases import Phase
from grpo_mp.utils.types import SampleGroup, SampleInfo

OnGroups = Callable[[str, Sequence[SampleGroup]], None]


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation: scores by eval set, metrics by name, and some answers."""

    scores: dict[str, EvalScore] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # some answers to each set, as Markdown; on rank 0 only
    shown: dict[str, list[SampleGroup]] = field(default_factory=dict)  # the groups in `texts`; on rank 0 only
    reward_stats: dict[str, RewardStats] = field(default_factory=dict)  # failures and logged values, over all ranks


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the weights that the engines hold on every set of `data.eval`."""

    prompts: dict[str, PromptSet]  # by name of the set
    sets: dict[str, EvalSetConfig]  # see Settings.eval_sets
    scorer: Scorer
    engines: Engines

    def evaluate(self, step: int, on_groups: OnGroups | None = None) -> Evaluation:
        """Evaluate every set; scores and metrics are equal on all ranks.

        `on_groups`: called for each set with its name and the groups of this rank's engine.
        """
        result = Evaluation()
        group = self.engines.job.group
        for name, prompts in self.prompts.items():
            groups, own_stats = self._generate(prompts, name, step)
            with self.engines.phases.phase(Phase.EVAL, name):
                infos: list[SampleInfo] = all_gather_sample_info(groups, group)
                votes = _all_gather_votes(groups, self.scorer, group) if self.scorer.has_answers else None
            stats = sum_stats(all_gather(own_stats, group))
            result.reward_stats[name] = stats
            for sentence in stats.first_errors.values():
                self.engines.monitors.progress.note(f"warning: {name}: {sentence}")
            result.scores[name] = score_eval_set(infos, votes, prompts.too_long)
            result.metrics.update(eval_metrics(name, result.scores[name]))
            result.metrics.update(eval_reward_metrics(name, stats))
            chosen = evenly_spaced(sorted({info.group_id for info in infos}), SHOWN_SAMPLES)
            if shown := gather_groups(groups, chosen, group):
                result.texts[metric_name("eval/{set}/samples", set=name)] = samples_to_markdown(shown)
                result.shown[name] = shown
            if on_groups:
                on_groups(name, groups)
        return result

    def _generate(self, prompts: PromptSet, name: str, step: int) -> tuple[list[SampleGroup], RewardStats]:
        """Return groups and statistics of this rank's engine; start the set again if all engines were lost."""
        for attempt in count():
            with self.engines.phases.phase(Phase.EVAL, name), watching_peers(self.engines.job.group) as check_peers:
                rule = AdmissionRule(len(prompts), len(prompts), len(prompts))
                key = f"eval/{name}/{step}/{attempt}"
                stream = GroupStream(self.engines.job.store, key, rule, len(self.engines.rollout.host_ranks))
                stream.check_peers = check_peers
                scored = self.engines.rollout.evaluate(prompts, self.sets[name], name, step, stream=stream)
            any_left = any(all_gather(scored is not None, self.engines.job.group))
            if not (any_left and self.engines.rollout.owns_devices):
                self.engines.recovery.run()
            if any_left:
                return scored or ([], RewardStats())
        raise AssertionError


def _all_gather_votes(groups: Sequence[SampleGroup], scorer: Scorer, cpu_group: dist.ProcessGroup) -> Votes:
    local_votes = {
        sample.key: number
        for group in groups
        for sample, number in zip(group.samples, scorer.answer_numbers(group), strict=True)
    }
    return {key: number for votes in all_gather(local_votes, cpu_group) for key, number in votes.items()}
