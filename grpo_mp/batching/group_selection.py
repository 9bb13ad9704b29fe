"""Decides which groups a step launches and trains on, and which prompts the curriculum skips."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from grpo_mp.algorithms.selection import Curriculum, call_curriculum
from grpo_mp.algorithms.settings import CurriculumConfig, FilterConfig
from grpo_mp.utils.types import SampleInfo

# Number of a finished group in the step's launch order, and whether the filter keeps it (None: the group was aborted).
Verdict = tuple[int, bool | None]
SKIP_STEPS = 50  # steps for which a prompt outside the curriculum's rates is skipped
MAX_LAUNCH_FACTOR = 10  # limit of launched / initially launched groups in a step with zero_std=refill


@dataclass(frozen=True)
class AdmissionRule:
    """Number of groups that a step needs and may launch.

    `launched`: groups launched at first. Each group that the filter drops allows one more, up to `max_launched` in
    total; so does each of the first `max_aborted` aborted groups. `lookahead`: largest number of groups of later steps
    that may be launched into free slots.
    """

    needed: int
    launched: int
    max_launched: int
    lookahead: int = 0
    max_aborted: int = 0


@dataclass(frozen=True)
class Admission:
    """Decision from the groups finished so far. Groups are numbered in launch order."""

    done: bool  # `selected` is final
    launch_limit: int  # groups with lower numbers may be launched for this step
    selected: tuple[int, ...]  # numbers of the groups that the step trains on
    consumed: int  # first group number of the next step


def admission_rule(rule: FilterConfig, needed: int, max_staleness: int) -> AdmissionRule:
    """Return the admission rule of a step that needs `needed` groups, from the settings of the filter."""
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
    """Return the response tokens at which a later step's group stops until the next step.

    `number`: the group's number in launch order, from the current step on. `needed`: groups per step. `steps_ahead`:
    number of steps by which a group may be launched early. `tokens_ahead`: tokens it may generate in each of these
    steps.
    """
    return tokens_ahead * max(1, steps_ahead - number // needed + 1)


def admit(verdicts: Sequence[Verdict], rule: AdmissionRule) -> Admission:
    """Decide from `verdicts`, which are in finishing order.

    The step selects the first `needed` kept groups in launch order. Neither the selection nor its response lengths
    depend on which group finished first.
    """
    kept = dict(verdicts)
    selected = list[int]()
    number = 0
    while number in kept and len(selected) < rule.needed:
        if kept[number]:
            selected.append(number)
        number += 1
    limit = _launch_limit(kept, rule)
    done = len(selected) == rule.needed or number == limit
    return Admission(done, limit, tuple(selected), number)


def _launch_limit(kept: Mapping[int, bool | None], rule: AdmissionRule) -> int:
    limit = rule.launched
    number = 0
    dropped = 0
    aborted = 0
    while number < limit:
        is_kept = kept.get(number, True)
        dropped = dropped + (is_kept is False)
        aborted = aborted + (is_kept is None)
        number = number + 1
        limit = min(rule.max_launched, rule.launched + dropped) + min(rule.max_aborted, aborted)
    return limit


def length_bias(infos: Sequence[SampleInfo], selected: Collection[int], aborted: Collection[int] = ()) -> float:
    """Return the mean response length of the selected groups divided by that of all launched groups.

    A value below 1 means that selection favours short responses. Aborted samples count with the tokens known so far, so
    the true value is lower. NaN if an aborted group reported no tokens at all.
    """
    if not set(aborted) <= {info.group_id for info in infos}:
        return math.nan
    lengths = [info.all_response_tokens for info in infos if info.group_id in selected]
    return fmean(lengths) / fmean(info.all_response_tokens for info in infos) if lengths else 1.0


@dataclass(frozen=True)
class PromptCurriculum:
    """State of the curriculum by prompt: last step in which the prompt is skipped, and its recent solve rates."""

    skipped_until: Mapping[int, int]
    solve_rates: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of its last `window` steps, in order

    def is_skipped(self, prompt: int, step: int) -> bool:
        """Return whether `prompt` is skipped in `step`."""
        return self.skipped_until.get(prompt, 0) >= step

    def updated(
        self, infos: Sequence[SampleInfo], step: int, rule: CurriculumConfig, function: Curriculum | None = None
    ) -> "PromptCurriculum":
        """Return the curriculum after a step. A prompt that becomes skipped loses its solve rates."""
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
            skipped_until=skipped_until | dict.fromkeys(outside, step + SKIP_STEPS),
            solve_rates={prompt: values for prompt, values in rates.items() if prompt not in outside},
        )
