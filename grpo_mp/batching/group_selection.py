"""Decide which groups a step launches and trains on, and which prompts it may take."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from grpo_mp.algorithms.selection import Curriculum, call_curriculum
from grpo_mp.algorithms.settings import CurriculumConfig, FilterConfig
from grpo_mp.utils.types import SampleInfo

# Number of an ended group in the step's launch order, and whether the filter keeps it; None: it was aborted.
Verdict = tuple[int, bool | None]
MAX_LAUNCH_FACTOR = 10  # groups launched per group needed, until a step that is refilled must be full


@dataclass(frozen=True)
class AdmissionRule:
    """How many groups a step needs, and how many it may launch for them. Numbers count groups in launch order.

    `launched`: at first; each group that the filter drops lets one more be launched, up to `max_launched`, and so does
    each of the first `max_aborted` that are aborted.
    `lookahead`: the most groups of later steps that may be launched where a slot is free.
    """

    needed: int
    launched: int
    max_launched: int
    lookahead: int = 0
    max_aborted: int = 0


@dataclass(frozen=True)
class Admission:
    """What the groups that have finished so far decide."""

    done: bool  # no other group can change `selected`
    launch_limit: int  # numbers below it may be launched for this step
    selected: tuple[int, ...]  # numbers of the groups that the step trains on
    consumed: int  # the next step begins with this number


def admission_rule(rule: FilterConfig, needed: int, max_staleness: int) -> AdmissionRule:
    """Return the rule of a step that needs so many groups."""
    launched = math.ceil(needed * rule.oversample_factor)
    max_launched = launched * MAX_LAUNCH_FACTOR if rule.zero_std == "refill" else launched
    return AdmissionRule(
        needed,
        launched,
        max_launched=max_launched,
        lookahead=needed * max_staleness,
        max_aborted=needed,
    )


def token_limit(number: int, needed: int, steps_ahead: int, tokens_ahead: int) -> int:
    """Return how many tokens the responses of a later step's group have when this step ends.

    A step needs `needed` groups, is begun `steps_ahead` steps before, and is given `tokens_ahead` tokens in each.
    """
    return tokens_ahead * max(1, steps_ahead - number // needed + 1)


def admit(verdicts: Sequence[Verdict], rule: AdmissionRule) -> Admission:
    """Decide from the verdicts, in the order in which groups finished.

    The step takes the first groups of the launch order that are kept, so neither the answer nor its length depends on
    which group was faster.
    """
    kept, selected, number = dict(verdicts), list[int](), 0
    while number in kept and len(selected) < rule.needed:
        if kept[number]:
            selected.append(number)
        number += 1
    limit = _launch_limit(kept, rule)
    done = len(selected) == rule.needed or number == limit
    return Admission(done, limit, tuple(selected), number)


def _launch_limit(kept: Mapping[int, bool | None], rule: AdmissionRule) -> int:
    limit, number, dropped, aborted = rule.launched, 0, 0, 0
    while number < limit:
        is_kept = kept.get(number, True)
        dropped, aborted, number = dropped + (is_kept is False), aborted + (is_kept is None), number + 1
        limit = min(rule.max_launched, rule.launched + dropped) + min(rule.max_aborted, aborted)
    return limit


def length_bias(infos: Sequence[SampleInfo], selected: Collection[int], aborted: Collection[int] = ()) -> float:
    """Divide the mean response length of the selected groups by that of all launched ones.

    Below 1: short answers were preferred. Samples that were broken off count with the tokens that are known, so the
    true value is lower. NaN where none is known of one of the `aborted` groups, which took longest.
    """
    if not set(aborted) <= {info.group_id for info in infos}:
        return math.nan
    lengths = [info.all_response_tokens for info in infos if info.group_id in selected]
    return fmean(lengths) / fmean(info.all_response_tokens for info in infos) if lengths else 1.0


@dataclass(frozen=True)
class PromptCurriculum:
    """By prompt: the last step in which it is skipped, and its shares of right samples."""

    skipped_until: Mapping[int, int]
    solve_rates: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of the last times, oldest first

    def is_skipped(self, prompt: int, step: int) -> bool:
        """Return whether a prompt is skipped in `step`."""
        return self.skipped_until.get(prompt, 0) >= step

    def updated(
        self, infos: Sequence[SampleInfo], step: int, rule: CurriculumConfig, function: Curriculum | None = None
    ) -> "PromptCurriculum":
        """Return the curriculum after a step; the rates of a prompt that was skipped start anew."""
        after = self._after_rates(infos, step, rule) if rule.window else self
        if function is None:
            return after
        skipped = {**after.skipped_until, **call_curriculum(function, infos, step)}
        return replace(after, skipped_until={prompt: last for prompt, last in skipped.items() if last > step})

    def _after_rates(self, infos: Sequence[SampleInfo], step: int, rule: CurriculumConfig) -> "PromptCurriculum":
        verdicts: dict[int, list[bool]] = {}
        for info in infos:
            if info.is_correct is not None:
                verdicts.setdefault(info.prompt, []).append(info.is_correct)
        rates = dict(self.solve_rates)
        for prompt, values in verdicts.items():
            rates[prompt] = (*rates.get(prompt, ()), fmean(values))[-rule.window :]
        outside = {
            prompt
            for prompt in verdicts
            if len(rates[prompt]) == rule.window and not rule.min_rate <= fmean(rates[prompt]) <= rule.max_rate
        }
        skipped_until = {prompt: last for prompt, last in self.skipped_until.items() if last > step}
        return replace(
            self,
            skipped_until=skipped_until | dict.fromkeys(outside, step + rule.skip_steps),
            solve_rates={prompt: values for prompt, values in rates.items() if prompt not in outside},
        )
