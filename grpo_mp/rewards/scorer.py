"""The scorer: weighted terms by name, each under a time limit, and what happens where one fails."""

import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import TrainerState

from grpo_mp.errors import UserError
from grpo_mp.rewards.base import (
    REWARDS,
    STEP_REWARDS,
    Reward,
    RewardError,
    T,
    Values,
    call_arguments,
    call_reward,
    call_step_reward,
    run_with_timeout,
    validate_steps,
    validate_values,
)
from grpo_mp.rewards.math import answer_numbers
from grpo_mp.rewards.reward_model import Decode, StepModelClient
from grpo_mp.rewards.settings import EPISODE, STEPS, RewardConfig, StepModelConfig
from grpo_mp.rewards.terms import BuiltInTerms
from grpo_mp.types import SampleGroup, StepRewards

SHOWN_CHARACTERS = 300
Extras = dict[str, list[Any]]  # what functions gave to log_extra for one group, by column


@dataclass
class RewardStats:
    """Counts since `Scorer.take_stats` was last called."""

    failures: Counter[str] = field(default_factory=Counter)  # failed calls by term; one call scores one group
    first_errors: dict[str, str] = field(default_factory=dict)  # by term: its first failure, in one sentence
    unscored: int = 0  # samples to which no term applied
    verify_timeouts: int = 0  # answers that math-verify could not compare in time; they count as wrong
    sums: dict[str, float] = field(default_factory=dict)  # of what functions gave to log_metric, by its name
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def logged(self) -> dict[str, float]:
        """Return the means of the values given to `log_metric`."""
        return {name: self.sums[name] / count for name, count in sorted(self.counts.items())}

    def log(self, name: str, value: float) -> None:
        """Add one value given to `log_metric`."""
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the stats as it is written to JSON."""
        return {
            "failures": dict(self.failures),
            "first_errors": self.first_errors,
            "unscored": self.unscored,
            "verify_timeouts": self.verify_timeouts,
            "logged": self.logged,
        }


def sum_stats(all_stats: Iterable[RewardStats]) -> RewardStats:
    """Add up all_stats; of several complaints about one term the first is kept."""
    merged = RewardStats()
    for stats in all_stats:
        merged.failures.update(stats.failures)
        merged.first_errors = stats.first_errors | merged.first_errors
        merged.unscored += stats.unscored
        merged.verify_timeouts += stats.verify_timeouts
        merged.sums |= {name: merged.sums.get(name, 0.0) + value for name, value in stats.sums.items()}
        merged.counts.update(stats.counts)
    return merged


class Scorer:
    """Scores groups by the settings. `score_group` is thread-safe."""

    def __init__(
        self,
        settings: RewardConfig,
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
        self._stats, self._timeouts_taken = RewardStats(), 0
        self._lock = threading.Lock()
        step_model = settings.steps if isinstance(settings.steps, StepModelConfig) else None
        self._step_model = StepModelClient(step_model, decode) if step_model and decode else None
        steps, self._keeps_steps = settings.steps, settings.steps == EPISODE
        by_function = isinstance(steps, str) and not self._keeps_steps
        self._step_reward = STEP_REWARDS.resolve(str(steps), "reward.steps") if by_function else None
        self._built_in = BuiltInTerms(settings, max_response_tokens)
        self._terms = {term.name: term.values for term in self._built_in.terms}
        self.term_weights = {term.name: term.weight for term in self._built_in.terms}  # by name
        self._functions: dict[str, Reward] = {}
        for spec, weight in settings.functions.items():
            name = settings.function_names[spec]
            self._functions[name], self.term_weights[name] = REWARDS.resolve(spec, "reward.functions"), weight
        self._correctness_rule = settings.correctness_rule

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the warnings that a user should read at the start."""
        missing = "no reward term defines correctness, so there is no accuracy: name one by reward.correct"
        return (*self._built_in.warnings, *([] if self._correctness_rule else [missing]))

    @property
    def has_answers(self) -> bool:
        """Return whether correctness is decided by comparing answers: then samples can vote on them."""
        return self._correctness_rule is not None and self._correctness_rule.term == "answer"

    def answer_numbers(self, group: SampleGroup) -> list[int | None]:
        """Give each sample's answer a number: equal answers have the same number; None: no answer."""
        responses = [sample.text for sample in group.samples]
        return answer_numbers(responses, self._built_in.verifier, self._settings.boxed_answer)

    def score_group(self, group: SampleGroup, step: int = 0) -> SampleGroup:
        """Return the group with its rewards: `reward` is the weighted sum of the unweighted `reward_terms` that apply.

        A sample to which no term applies gets the mean of its group: its advantage is 0 and changes no other's.
        Rewards of steps are kept in `step_rewards`; only their mean is shown among the terms. `is_correct` is set by
        the term that the settings name; None where that term failed or does not apply.
        Raises UserError for a failing reward under `on_error: stop`.
        """
        extras: Extras = {}
        results = {name: self._values(name, group, step, extras) for name in self.term_weights}
        terms = [
            {name: value for name, (values, _) in results.items() if (value := values[i]) is not None}
            for i in range(len(group.samples))
        ]
        all_steps, weights = self._steps(group, step, extras), self.term_weights
        totals = [sum(weights[name] * value for name, value in scored.items()) for scored in terms]
        mean = statistics.fmean([t for t, scored in zip(totals, terms, strict=True) if scored] or [0.0])
        with self._lock:
            self._stats.unscored += sum(not scored for scored in terms) if weights else 0
        rule = self._correctness_rule
        if rule and not results[rule.term][1]:  # the default of a failed call decides nothing
            rule = None
        final_extras = dict(extras)  # a call that took too long may still write into `extras`
        rows = zip(group.samples, totals, terms, all_steps, strict=True)
        samples = (
            replace(
                sample,
                reward=float(total) if scored else mean,
                reward_terms=scored | ({STEPS: statistics.fmean(reward for _, reward in steps)} if steps else {}),
                step_rewards=steps,
                extra={column: values[i] for column, values in final_extras.items()},
                is_correct=scored[rule.term] >= rule.min_value if rule and rule.term in scored else None,
            )
            for i, (sample, total, scored, steps) in enumerate(rows)
        )
        return replace(group, samples=tuple(samples))

    def take_stats(self) -> RewardStats:
        """Return this rank's statistics since the last call, and start new ones."""
        with self._lock:
            stats, self._stats = self._stats, RewardStats()
            timeouts = self._built_in.verifier.timeouts
            stats.verify_timeouts, self._timeouts_taken = timeouts - self._timeouts_taken, timeouts
        return stats

    def close(self) -> None:
        """End the process that compares answers, and connections."""
        self._built_in.close()
        if self._step_model:
            self._step_model.close()

    def _values(self, name: str, group: SampleGroup, step: int, extras: Extras) -> tuple[Values, bool]:
        """Return one value per sample, and whether the call succeeded."""

        def call() -> Values:
            if name in self._terms:
                return validate_values(self._terms[name](group), group)
            call_function = partial(call_reward, self._functions[name], self._arguments(group, step, extras))
            return validate_values(run_with_timeout(call_function, self._settings.timeout_s), group)

        return self._or_default(name, group, call, lambda reward: [reward] * len(group.samples))

    def _steps(self, group: SampleGroup, step: int, extras: Extras) -> list[StepRewards]:
        model, reward = self._step_model, self._step_reward

        def call() -> list[StepRewards]:
            if self._keeps_steps:
                return [sample.step_rewards for sample in group.samples]
            if model:
                return validate_steps(model.score_steps(group), group)
            if reward is None:
                return [()] * len(group.samples)
            call_function = partial(call_step_reward, reward, self._arguments(group, step, extras))
            return validate_steps(run_with_timeout(call_function, self._settings.timeout_s), group)

        def at_the_end(default: float) -> list[StepRewards]:
            return [((len(sample.tokens) - 1, default),) for sample in group.samples]

        return self._or_default(STEPS, group, call, at_the_end)[0]

    def _or_default(
        self, name: str, group: SampleGroup, call: Callable[[], T], default: Callable[[float], T]
    ) -> tuple[T, bool]:
        """Return the result of `call` and True, or where it fails `default(reward.on_error)` and False.

        Raises UserError under `on_error: stop`.
        """
        try:
            return call(), True
        except RewardError as failure:
            text = group.samples[failure.sample].text
            excerpt = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
            sentence = (
                f"reward {name}: prompt {group.prompt.index}: {failure}; sample {failure.sample}: {excerpt!r}; "
                "fix the reward function, or set reward.on_error to the score of a failing call"
            )
            if self._settings.on_error == "stop":
                raise UserError(sentence) from failure
            with self._lock:
                self._stats.failures[name] += 1
                self._stats.first_errors.setdefault(name, sentence)
            return default(float(self._settings.on_error)), False

    def _arguments(self, group: SampleGroup, step: int, extras: Extras) -> dict[str, Any]:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(group.samples):
                raise ValueError(
                    f"log_extra({column!r}, ...) got {len(values)} values for {len(group.samples)} samples"
                )
            extras[column] = list(values)

        def log_metric(name: str, value: float) -> None:
            number = float(value)
            with self._lock:
                self._stats.log(name, number)

        state = TrainerState(global_step=step, max_steps=self._max_steps)
        return call_arguments(
            group, self._prompt_column, trainer_state=state, log_extra=log_extra, log_metric=log_metric
        )
