"""Which groups of a step are trained on, and which prompts are taken. Pure."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_mp.algorithms.advantages import groups_without_difference
from grpo_mp.algorithms.settings import Filter
from grpo_mp.types import SampleInfo

SMALLEST_SHARE = 0.1  # of the launched groups that is counted on: bounds what one round launches


@dataclass(frozen=True)
class GroupSelection:
    """What became of the groups that were launched for a step, so far."""

    admitted: tuple[int, ...]  # group ids in launch order
    no_difference: int  # groups dropped because all their rewards are equal
    surplus: int  # groups that were not needed
    unfinished: int  # groups that were broken off

    def missing(self, wanted: int) -> int:
        return wanted - len(self.admitted)


def admit(infos: Sequence[SampleInfo], wanted: int, rule: Filter) -> GroupSelection:
    """Take the first `wanted` groups by launch or by finish, and none without difference where the rule drops them."""
    whole = [info for info in infos if info.finished]
    places = {info.group_id: info.finished if rule.admit == "finish" else info.group_id for info in whole}
    same: set[int] = set()
    if rule.no_difference != "keep":
        judged = {info.group_id for info in whole if info.right is not None and rule.metric == "accuracy"}
        # Where nothing says what right means, for a group of another kind of problem, the reward must differ.
        values = [float(info.right is True) if info.group_id in judged else info.reward for info in whole]
        same = set(groups_without_difference(values, [info.group_id for info in whole]))
    able = sorted(places.keys() - same, key=lambda group: (places[group], group))
    broken_off = len({info.group_id for info in infos}) - len(places)
    return GroupSelection(tuple(sorted(able[:wanted])), len(same), max(0, len(able) - wanted), broken_off)


def length_bias(infos: Sequence[SampleInfo], admitted: Collection[int]) -> float:
    """Mean response length of what was admitted over that of all that was launched.

    Below 1: short answers were preferred. What was broken off counts with the tokens it had, so the truth is lower.
    """
    taken = [info.response_tokens for info in infos if info.group_id in admitted]
    return fmean(taken) / fmean(info.response_tokens for info in infos) if taken else 1.0


def to_launch(missing: int, launched: int, so_far: GroupSelection, rule: Filter) -> int:
    """Groups to launch for those that are missing: more, the smaller the share that taught something so far."""
    share = (len(so_far.admitted) + so_far.surplus) / launched if launched else 1.0
    return math.ceil(missing * rule.oversample / max(share, SMALLEST_SHARE))


@dataclass(frozen=True)
class PromptCurriculum:
    """Prompts whose samples were all right: how often in a row, and until which step they rest."""

    in_a_row: Mapping[int, int]
    resting: Mapping[int, int]

    def rests(self, prompt: int, step: int) -> bool:
        """Whether a prompt is left out of `step`."""
        return self.resting.get(prompt, 0) >= step

    def after(self, infos: Sequence[SampleInfo], step: int, rule: Filter) -> "PromptCurriculum":
        """The state after a step. A prompt that returns from its rest begins anew."""
        if not rule.rest_after:
            return self
        all_right: dict[int, bool] = {}
        for info in infos:
            all_right[info.prompt] = all_right.get(info.prompt, True) and info.right is True
        counts = dict(self.in_a_row) | {
            p: self.in_a_row.get(p, 0) + 1 if right else 0 for p, right in all_right.items()
        }
        done = {prompt for prompt, count in counts.items() if count >= rule.rest_after}
        resting = {prompt: last for prompt, last in self.resting.items() if last > step}
        return PromptCurriculum(
            {prompt: count for prompt, count in counts.items() if count and prompt not in done},
            resting | dict.fromkeys(done, step + rule.rest_steps),
        )
