"""Select the groups that a step trains on, and the prompts that it may take. Pure."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_mp.algorithms.group_filters import GroupFilter
from grpo_mp.algorithms.settings import CurriculumConfig, FilterConfig
from grpo_mp.types import SampleInfo

MIN_KEPT_SHARE = 0.1  # of launched groups, as assumed at least: bounds what one round launches


@dataclass(frozen=True)
class GroupSelection:
    """How many of the groups launched so far for a step were selected, and why others were not."""

    selected: tuple[int, ...]  # group ids in launch order
    zero_std: int  # groups dropped as uninformative, by filter.metric
    surplus: int  # groups that were not needed
    unfinished: int  # groups that were aborted


def select_groups(
    infos: Sequence[SampleInfo], count: int, rule: FilterConfig, group_filter: GroupFilter
) -> GroupSelection:
    """Select the first `count` groups by launch or by finish; with the rule, those that pass `group_filter`."""
    groups: dict[int, list[SampleInfo]] = defaultdict(list)
    for info in infos:
        if info.finish_order:
            groups[info.group_id].append(info)
    position = {
        group: samples[0].finish_order if rule.select_by == "finish" else group for group, samples in groups.items()
    }
    zero_std: set[int] = set()
    if rule.zero_std != "keep":
        zero_std = {group for group, samples in groups.items() if not group_filter(samples)}
    eligible = sorted(position.keys() - zero_std, key=lambda group: (position[group], group))
    aborted = len({info.group_id for info in infos}) - len(position)
    return GroupSelection(tuple(sorted(eligible[:count])), len(zero_std), max(0, len(eligible) - count), aborted)


def length_bias(infos: Sequence[SampleInfo], selected: Collection[int]) -> float:
    """Divide the mean response length of the selected groups by that of all launched ones.

    Below 1: short answers were preferred. Aborted samples count with the tokens they had, so the true value is lower.
    """
    lengths = [info.response_tokens for info in infos if info.group_id in selected]
    return fmean(lengths) / fmean(info.response_tokens for info in infos) if lengths else 1.0


def groups_to_launch(missing: int, launched: int, selection: GroupSelection, rule: FilterConfig) -> int:
    """Return how many groups to launch for the missing ones: more, the smaller the share kept so far."""
    kept_share = (len(selection.selected) + selection.surplus) / launched if launched else 1.0
    return math.ceil(missing * rule.oversample_factor / max(kept_share, MIN_KEPT_SHARE))


@dataclass(frozen=True)
class PromptCurriculum:
    """Steps in a row in which all samples were right, and the last step to skip; both by prompt."""

    solved_streak: Mapping[int, int]
    skipped_until: Mapping[int, int]

    def is_skipped(self, prompt: int, step: int) -> bool:
        """Return whether a prompt is skipped in `step`."""
        return self.skipped_until.get(prompt, 0) >= step

    def updated(self, infos: Sequence[SampleInfo], step: int, rule: CurriculumConfig) -> "PromptCurriculum":
        """Return the curriculum after a step; the streak of a prompt that was skipped starts at zero."""
        if not rule.solved_streak:
            return self
        all_correct: dict[int, bool] = {}
        for info in infos:
            all_correct[info.prompt] = all_correct.get(info.prompt, True) and info.is_correct is True
        streaks = dict(self.solved_streak) | {
            prompt: self.solved_streak.get(prompt, 0) + 1 if correct else 0 for prompt, correct in all_correct.items()
        }
        solved = {prompt for prompt, count in streaks.items() if count >= rule.solved_streak}
        skipped_until = {prompt: last for prompt, last in self.skipped_until.items() if last > step}
        return PromptCurriculum(
            {prompt: count for prompt, count in streaks.items() if count and prompt not in solved},
            skipped_until | dict.fromkeys(solved, step + rule.skip_steps),
        )
