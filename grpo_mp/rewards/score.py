"""The scorer: weighted parts by name, each under a time limit, with one rule for what fails."""

import math
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import TrainerState

from grpo_mp.config import Reward as RewardSettings
from grpo_mp.errors import UserError
from grpo_mp.rewards.base import Callbacks, Reward, call_arguments, call_reward, load_reward
from grpo_mp.rewards.equality import Equality
from grpo_mp.rewards.limit import RewardError, Values, run_limited
from grpo_mp.rewards.math import answer_part, boxed_part, length_part
from grpo_mp.types import SampleGroup

EQUALITY_LIMIT_S = 5.0
SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Part:
    """One named reward: values for a group, at a step."""

    name: str
    weight: float
    values: Callable[[SampleGroup, int], Values]


class Scorer:
    """Scores groups by the settings. `score_group` may be called from several threads at once."""

    def __init__(
        self, settings: RewardSettings, max_response_tokens: int, prompt_column: str = "prompt", max_steps: int = 0
    ) -> None:
        """Loads the user's functions. Raises UserError where one cannot be imported."""
        self.errors: Counter[str] = Counter()  # failed calls by reward name
        self.unscored = 0  # samples to which no reward applied
        self._settings = settings
        self._prompt_column = prompt_column
        self._max_steps = max_steps
        self._equality = Equality(min(EQUALITY_LIMIT_S, settings.timeout_s))
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        rules = self._rule_parts(max_response_tokens)
        self._parts = (*rules, *self._function_parts([part.name for part in rules]))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, as in `Sample.reward_parts`."""
        return tuple(part.name for part in self._parts)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each part by its name."""
        return {part.name: part.weight for part in self._parts}

    @property
    def answers_given_up(self) -> int:
        """Answers that math-verify could not compare in time; they count as wrong."""
        return self._equality.timeouts

    def score_group(self, group: SampleGroup, step: int = 0) -> SampleGroup:
        """The group with `reward` (weighted sum) and `reward_parts` (unweighted, those that apply) filled in.

        A sample to which no part applies gets the mean of its group: its advantage is zero and moves no other's.
        Raises UserError for a failing reward under `on_error: stop`.
        """
        columns = {part.name: self._checked_values(part, group, step) for part in self._parts}
        weights = self.weights
        parts = [
            {name: value for name, values in columns.items() if (value := values[i]) is not None}
            for i in range(len(group.samples))
        ]
        totals = [sum(weights[name] * value for name, value in scored.items()) for scored in parts]
        mean = statistics.fmean([t for t, scored in zip(totals, parts, strict=True) if scored] or [0.0])
        with self._lock:
            self.unscored += sum(not scored for scored in parts)
        samples = (
            replace(sample, reward=float(total) if scored else mean, reward_parts=scored)
            for sample, total, scored in zip(group.samples, totals, parts, strict=True)
        )
        return replace(group, samples=tuple(samples))

    def take_metrics(self) -> dict[str, float]:
        """Means of what reward functions gave to `log_metric` since the last call."""
        with self._lock:
            means = {name: statistics.fmean(values) for name, values in self._metrics.items()}
            self._metrics.clear()
        return means

    def close(self) -> None:
        """End the process that compares answers."""
        self._equality.close()

    def _checked_values(self, part: Part, group: SampleGroup, step: int) -> Values:
        try:
            values = part.values(group, step)
            _check_values(values, len(group.samples))
            return values
        except RewardError as failure:
            if self._settings.on_error == "stop":
                raise UserError(_failure_sentence(part.name, group, failure)) from failure
            with self._lock:
                self.errors[part.name] += 1
            return [float(self._settings.on_error)] * len(group.samples)

    def _rule_parts(self, max_response_tokens: int) -> list[Part]:
        def boxed(group: SampleGroup, step: int) -> Values:
            return [boxed_part(sample.text) for sample in group.samples]

        def length(group: SampleGroup, step: int) -> Values:
            return [length_part(len(sample.tokens), max_response_tokens) for sample in group.samples]

        weights = self._settings
        parts = [
            Part("answer", weights.answer, self._answers),
            Part("boxed", weights.boxed, boxed),
            Part("length", weights.length, length),
        ]
        return [part for part in parts if part.weight]

    def _answers(self, group: SampleGroup, step: int) -> Values:
        answer = group.prompt.answer
        if answer is None:
            raise UserError("reward.answer: the prompts have no answer: set data.answer to its column")
        return [answer_part(sample.text, answer, self._equality) for sample in group.samples]

    def _function_parts(self, rule_names: list[str]) -> list[Part]:
        """Named by function; by module and function where the short name stands for more than one part."""
        loaded = {spec: load_reward(spec) for spec in self._settings.functions}
        short = {spec: spec.rpartition(":")[2] for spec in loaded}
        taken = Counter([*short.values(), *rule_names])
        return [
            Part(short[spec] if taken[short[spec]] == 1 else spec, weight, self._limited(loaded[spec]))
            for spec, weight in self._settings.functions.items()
        ]

    def _limited(self, reward: Reward) -> Callable[[SampleGroup, int], Values]:
        def values(group: SampleGroup, step: int) -> Values:
            state = TrainerState(global_step=step, max_steps=self._max_steps)
            callbacks = Callbacks(state, _ignore_extra, self._log_metric)
            arguments = call_arguments(group, self._prompt_column, callbacks)
            return run_limited(lambda: call_reward(reward, arguments), self._settings.timeout_s)

        return values

    def _log_metric(self, name: str, value: float) -> None:
        with self._lock:
            self._metrics[name].append(float(value))


def _check_values(values: Values, count: int) -> None:
    if len(values) != count:
        raise RewardError(f"returned {len(values)} values for {count} samples")
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise RewardError(f"returned {value}, which is not finite", index)


def _failure_sentence(name: str, group: SampleGroup, failure: RewardError) -> str:
    text = group.samples[failure.sample].text
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return (
        f"reward {name}: prompt {group.prompt.index}: {failure}; sample {failure.sample}: {shown!r}; "
        "mend the function, or set reward.on_error to the reward that a failing call scores"
    )


def _ignore_extra(column: str, values: list[Any]) -> None:
    """TRL shows these columns in its table of completions; this project has no such table."""
