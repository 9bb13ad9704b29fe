"""The scorer: weighted parts by name, each under a time limit, with one rule for what fails."""

import math
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from transformers import TrainerState

from grpo_mp.errors import UserError
from grpo_mp.rewards.base import Callbacks, Reward, call_arguments, call_reward, call_user, load_reward
from grpo_mp.rewards.limit import RewardError, Values, run_limited
from grpo_mp.rewards.parts import BuiltIn, Part
from grpo_mp.rewards.settings import Reward as RewardSettings
from grpo_mp.rewards.steps import Steps, checked_steps, fallback_steps
from grpo_mp.types import SampleGroup

SHOWN_CHARACTERS = 300
STEPS = "steps"  # the name under which step rewards are logged; no part of the reward
T = TypeVar("T")


class Scorer:
    """Scores groups by the settings. `score_group` may be called from several threads at once."""

    def __init__(
        self, settings: RewardSettings, max_response_tokens: int, prompt_column: str = "prompt", max_steps: int = 0
    ) -> None:
        """Loads the user's functions. Raises UserError where one cannot be imported, or `reward.code` cannot run."""
        self.errors: Counter[str] = Counter()  # failed calls by reward name
        self.unscored = 0  # samples to which no reward applied
        self._settings = settings
        self._prompt_column = prompt_column
        self._max_steps = max_steps
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self._step_reward = load_reward(settings.steps, "reward.steps") if settings.steps else None
        self._built_in = BuiltIn(settings, max_response_tokens)
        built_in = self._built_in.parts
        taken = [part.name for part in built_in] + [STEPS] * bool(settings.steps)
        self._parts = (*built_in, *self._function_parts(taken))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that stand in `Sample.reward_parts`."""
        return (*(part.name for part in self._parts), *([STEPS] if self._step_reward else []))

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each part by its name."""
        return {part.name: part.weight for part in self._parts}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before the run goes on."""
        return self._built_in.warnings

    @property
    def answers_given_up(self) -> int:
        """Answers that math-verify could not compare in time; they count as wrong."""
        return self._built_in.equality.timeouts

    @property
    def has_answers(self) -> bool:
        """Whether a part looks at the answers that responses give."""
        return any(part.name == "answer" for part in self._built_in.parts)

    def answer_numbers(self, group: SampleGroup) -> list[int | None]:
        """Which answer each sample gives: samples with the same answer have the same number; None: no answer."""
        return self._built_in.answer_numbers(group)

    def score_group(self, group: SampleGroup, step: int = 0) -> SampleGroup:
        """The group with its rewards: `reward` is the weighted sum of `reward_parts`, the parts that apply, unweighted.

        A sample to which no part applies gets the mean of its group: its advantage is zero and moves no other's.
        Rewards of steps stand apart, in `step_rewards`; only their mean is shown among the parts.
        Raises UserError for a failing reward under `on_error: stop`.
        """
        parts, all_steps = self._part_values(group, step), self._steps(group, step)
        weights = self.weights
        totals = [sum(weights[name] * value for name, value in scored.items()) for scored in parts]
        mean = statistics.fmean([t for t, scored in zip(totals, parts, strict=True) if scored] or [0.0])
        with self._lock:
            self.unscored += sum(not scored for scored in parts) if self._parts else 0
        samples = (
            replace(
                sample,
                reward=float(total) if scored else mean,
                reward_parts=scored | _mean_step(steps),
                step_rewards=steps,
            )
            for sample, total, scored, steps in zip(group.samples, totals, parts, all_steps, strict=True)
        )
        return replace(group, samples=tuple(samples))

    def take_metrics(self) -> dict[str, float]:
        """Means of what reward functions gave to `log_metric` since the last call."""
        with self._lock:
            means = {name: statistics.fmean(values) for name, values in self._metrics.items()}
            self._metrics.clear()
        return means

    def close(self) -> None:
        """End the process that compares answers, and connections."""
        self._built_in.close()

    def _part_values(self, group: SampleGroup, step: int) -> list[dict[str, float]]:
        """By name, for each sample, the parts that apply."""
        columns = {part.name: self._checked_values(part, group, step) for part in self._parts}
        return [
            {name: value for name, values in columns.items() if (value := values[i]) is not None}
            for i in range(len(group.samples))
        ]

    def _checked_values(self, part: Part, group: SampleGroup, step: int) -> Values:
        def values() -> Values:
            found = part.values(group, step)
            _check_values(found, len(group.samples))
            return found

        return self._or_default(part.name, group, values, lambda reward: [reward] * len(group.samples))

    def _steps(self, group: SampleGroup, step: int) -> list[Steps]:
        reward = self._step_reward
        if reward is None:
            return [()] * len(group.samples)

        def rows() -> list[Any]:
            returned = call_user(reward, self._arguments(group, step))
            return [None if row is None else list(row) for row in returned]

        def steps() -> list[Steps]:
            return checked_steps(run_limited(rows, self._settings.timeout_s), group)

        return self._or_default(STEPS, group, steps, lambda default: fallback_steps(group, default))

    def _or_default(self, name: str, group: SampleGroup, call: Callable[[], T], default: Callable[[float], T]) -> T:
        """What `call` returns; where it fails, `default` of reward.on_error, or UserError under `stop`."""
        try:
            return call()
        except RewardError as failure:
            if self._settings.on_error == "stop":
                raise UserError(_failure_sentence(name, group, failure)) from failure
            with self._lock:
                self.errors[name] += 1
            return default(float(self._settings.on_error))

    def _function_parts(self, other_names: list[str]) -> list[Part]:
        """Named by function; by module and function where the short name stands for more than one part."""
        loaded = {spec: load_reward(spec) for spec in self._settings.functions}
        short = {spec: spec.rpartition(":")[2] for spec in loaded}
        taken = Counter([*short.values(), *other_names])
        return [
            Part(short[spec] if taken[short[spec]] == 1 else spec, weight, self._limited(loaded[spec]))
            for spec, weight in self._settings.functions.items()
        ]

    def _limited(self, reward: Reward) -> Callable[[SampleGroup, int], Values]:
        def values(group: SampleGroup, step: int) -> Values:
            arguments = self._arguments(group, step)
            return run_limited(lambda: call_reward(reward, arguments), self._settings.timeout_s)

        return values

    def _arguments(self, group: SampleGroup, step: int) -> dict[str, Any]:
        state = TrainerState(global_step=step, max_steps=self._max_steps)
        return call_arguments(group, self._prompt_column, Callbacks(state, _ignore_extra, self._log_metric))

    def _log_metric(self, name: str, value: float) -> None:
        with self._lock:
            self._metrics[name].append(float(value))


def _check_values(values: Values, count: int) -> None:
    if len(values) != count:
        raise RewardError(f"returned {len(values)} values for {count} samples")
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise RewardError(f"returned {value}, which is not finite", index)


def _mean_step(steps: Steps) -> dict[str, float]:
    return {STEPS: statistics.fmean(reward for _, reward in steps)} if steps else {}


def _failure_sentence(name: str, group: SampleGroup, failure: RewardError) -> str:
    text = group.samples[failure.sample].text
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return (
        f"reward {name}: prompt {group.prompt.index}: {failure}; sample {failure.sample}: {shown!r}; "
        "mend it, or set reward.on_error to the reward that a failing call scores"
    )


def _ignore_extra(column: str, values: list[Any]) -> None:
    """TRL shows these columns in its table of completions; this project has no such table."""
