"""The scorer: weighted parts by name, each under a time limit, with one rule for what fails."""

import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import TrainerState

from grpo_mp.errors import UserError, nearest
from grpo_mp.rewards.base import Callbacks, Reward, call_arguments, call_reward, call_user, load_reward
from grpo_mp.rewards.settings import Reward as RewardSettings
from grpo_mp.rewards.settings import Right, StepModel
from grpo_mp.rewards.step_model import Decode, StepModelClient
from grpo_mp.rewards.steps import Steps, checked_steps, fallback_steps
from grpo_mp.rewards.tally import Tally
from grpo_mp.rewards.terms import BuiltIn, RewardTerm
from grpo_mp.rewards.timeouts import RewardError, Values, run_limited
from grpo_mp.types import SampleGroup

SHOWN_CHARACTERS = 300
STEPS = "steps"  # the name under which step rewards are logged; no part of the reward
T = TypeVar("T")
Extras = dict[str, list[Any]]  # what functions gave to log_extra for one group, by column
PartCall = Callable[[SampleGroup, int, Extras], Values]


class Scorer:
    """Scores groups by the settings. `score_group` may be called from several threads at once."""

    def __init__(
        self,
        settings: RewardSettings,
        max_response_tokens: int,
        prompt_column: str = "prompt",
        max_steps: int = 0,
        decode: Decode | None = None,
    ) -> None:
        """Load the user's functions. `decode`, the policy's tokenizer, is needed for a served model of steps.

        Raises UserError where a function cannot be imported, or `reward.code` cannot run.
        """
        self._settings = settings
        self._prompt_column = prompt_column
        self._max_steps = max_steps
        self._tally, self._given_up_before = Tally(), 0
        self._lock = threading.Lock()
        served = settings.steps if isinstance(settings.steps, StepModel) else None
        self._step_model = StepModelClient(served, decode) if served and decode else None
        self._step_reward = load_reward(settings.steps, "reward.steps") if isinstance(settings.steps, str) else None
        self._built_in = BuiltIn(settings, max_response_tokens)
        built_in = self._built_in.parts
        taken = [part.name for part in built_in] + [STEPS] * bool(settings.steps)
        functions = self._functions(taken)
        self._weights = {part.name: part.weight for part in built_in} | {name: w for name, (w, _) in functions.items()}
        self._calls = {part.name: _without_extras(part) for part in built_in}
        self._calls |= {name: self._limited(reward) for name, (_, reward) in functions.items()}
        self._right = _known_part(settings, list(self._weights))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that stand in `Sample.reward_parts`."""
        return (*self._weights, *([STEPS] if self._settings.steps else []))

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each part by its name."""
        return dict(self._weights)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before the run goes on."""
        silent = "nothing says which answers are right, so there is no accuracy: reward.right names the part that does"
        return (*self._built_in.warnings, *([] if self._right else [silent]))

    @property
    def has_answers(self) -> bool:
        """Whether what is right is said by the part that compares answers: then they can be voted on."""
        return self._right is not None and self._right.part == "answer"

    def answer_numbers(self, group: SampleGroup) -> list[int | None]:
        """Which answer each sample gives: samples with the same answer have the same number; None: no answer."""
        return self._built_in.answer_numbers(group)

    def score_group(self, group: SampleGroup, step: int = 0) -> SampleGroup:
        """The group with its rewards: `reward` is the weighted sum of `reward_parts`, the parts that apply, unweighted.

        A sample to which no part applies gets the mean of its group: its advantage is zero and moves no other's.
        Rewards of steps stand apart, in `step_rewards`; only their mean is shown among the parts. `right` is said by
        the part that the settings name, and by none where that part failed or does not apply.
        Raises UserError for a failing reward under `on_error: stop`.
        """
        extras: Extras = {}
        columns, failed = self._part_values(group, step, extras)
        parts = [_applying(columns, i) for i in range(len(group.samples))]
        all_steps, weights = self._steps(group, step, extras), self._weights
        totals = [sum(weights[name] * value for name, value in scored.items()) for scored in parts]
        mean = statistics.fmean([t for t, scored in zip(totals, parts, strict=True) if scored] or [0.0])
        with self._lock:
            self._tally.unscored += sum(not scored for scored in parts) if weights else 0
        shown = dict(extras)  # a call that took too long may still write into the other
        rows = zip(group.samples, totals, parts, all_steps, strict=True)
        samples = (
            replace(
                sample,
                reward=float(total) if scored else mean,
                reward_parts=scored | _mean_step(steps),
                step_rewards=steps,
                extra={column: values[i] for column, values in shown.items()},
                right=_is_right({} if self._right and self._right.part in failed else scored, self._right),
            )
            for i, (sample, total, scored, steps) in enumerate(rows)
        )
        return replace(group, samples=tuple(samples))

    def take_tally(self) -> Tally:
        """What this rank's rewards met since the last call."""
        with self._lock:
            taken, self._tally = self._tally, Tally()
            given_up = self._built_in.equality.timeouts
            taken.given_up, self._given_up_before = given_up - self._given_up_before, given_up
        return taken

    def close(self) -> None:
        """End the process that compares answers, and connections."""
        self._built_in.close()
        if self._step_model:
            self._step_model.close()

    def _part_values(self, group: SampleGroup, step: int, extras: Extras) -> tuple[dict[str, Values], set[str]]:
        """One value per sample by part, and the parts that failed."""
        found = {name: self._checked_values(name, group, step, extras) for name in self._calls}
        failed = {name for name, (_, ok) in found.items() if not ok}
        return {name: values for name, (values, _) in found.items()}, failed

    def _checked_values(self, name: str, group: SampleGroup, step: int, extras: Extras) -> tuple[Values, bool]:
        def values() -> Values:
            found = self._calls[name](group, step, extras)
            _check_values(found, len(group.samples))
            return found

        return self._or_default(name, group, values, lambda reward: [reward] * len(group.samples))

    def _steps(self, group: SampleGroup, step: int, extras: Extras) -> list[Steps]:
        model, reward = self._step_model, self._step_reward
        if model is None and reward is None:
            return [()] * len(group.samples)
        arguments = self._arguments(group, step, extras)

        def rows() -> list[Any]:
            returned = call_user(reward, arguments) if reward else []
            return [None if row is None else list(row) for row in returned]

        def steps() -> list[Steps]:
            found = model.rows(group) if model else run_limited(rows, self._settings.timeout_s)
            return checked_steps(found, group)

        return self._or_default(STEPS, group, steps, lambda default: fallback_steps(group, default))[0]

    def _or_default(
        self, name: str, group: SampleGroup, call: Callable[[], T], default: Callable[[float], T]
    ) -> tuple[T, bool]:
        """What `call` returns, and True; where it fails, `default` of reward.on_error, or UserError under `stop`."""
        try:
            return call(), True
        except RewardError as failure:
            if self._settings.on_error == "stop":
                raise UserError(_failure_sentence(name, group, failure)) from failure
            with self._lock:
                self._tally.failures[name] += 1
                self._tally.complaints.setdefault(name, _failure_sentence(name, group, failure))
            return default(float(self._settings.on_error)), False

    def _functions(self, other_names: list[str]) -> dict[str, tuple[float, Reward]]:
        """Weight and reward by function; by module and function where the short name stands for more than one part."""
        short = {spec: spec.rpartition(":")[2] for spec in self._settings.functions}
        taken = Counter([*short.values(), *other_names])
        return {
            short[spec] if taken[short[spec]] == 1 else spec: (weight, load_reward(spec))
            for spec, weight in self._settings.functions.items()
        }

    def _limited(self, reward: Reward) -> PartCall:
        def values(group: SampleGroup, step: int, extras: Extras) -> Values:
            arguments = self._arguments(group, step, extras)
            return run_limited(lambda: call_reward(reward, arguments), self._settings.timeout_s)

        return values

    def _arguments(self, group: SampleGroup, step: int, extras: Extras) -> dict[str, Any]:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(group.samples):
                raise ValueError(
                    f"log_extra({column!r}, ...) got {len(values)} values for {len(group.samples)} samples"
                )
            extras[column] = list(values)

        state = TrainerState(global_step=step, max_steps=self._max_steps)
        return call_arguments(group, self._prompt_column, Callbacks(state, log_extra, self._log_metric))

    def _log_metric(self, name: str, value: float) -> None:
        number = float(value)
        with self._lock:
            self._tally.log(name, number)


def _without_extras(part: RewardTerm) -> PartCall:
    return lambda group, step, _: part.values(group, step)


def _check_values(values: Values, count: int) -> None:
    if len(values) != count:
        raise RewardError(f"returned {len(values)} values for {count} samples")
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise RewardError(f"returned {value}, which is not finite", index)


def _applying(columns: dict[str, Values], sample: int) -> dict[str, float]:
    return {name: value for name, values in columns.items() if (value := values[sample]) is not None}


def _known_part(settings: RewardSettings, names: list[str]) -> Right | None:
    """What the settings say right means. Raises UserError for a part that there is not."""
    right = settings.says_right
    if right and right.part not in names:
        raise UserError(
            f"reward.right: no part of the reward is named {right.part!r}{nearest(right.part, names)}; there are: "
            f"{', '.join(names)}"
        )
    return right


def _is_right(parts: dict[str, float], right: Right | None) -> bool | None:
    """Whether a sample with these parts is right; None where nothing says so."""
    return parts[right.part] >= right.at_least if right and right.part in parts else None


def _mean_step(steps: Steps) -> dict[str, float]:
    return {STEPS: statistics.fmean(reward for _, reward in steps)} if steps else {}


def _failure_sentence(name: str, group: SampleGroup, failure: RewardError) -> str:
    text = group.samples[failure.sample].text
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return (
        f"reward {name}: prompt {group.prompt.index}: {failure}; sample {failure.sample}: {shown!r}; "
        "mend it, or set reward.on_error to the reward that a failing call scores"
    )
