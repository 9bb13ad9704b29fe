"""The scorer: adds up weighted reward terms, each computed under a time limit, and handles terms that fail."""

import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mp.rewards.base import (
    REWARDS,
    STEP_REWARDS,
    RewardError,
    T,
    Values,
    call_arguments,
    call_reward,
    read_steps,
    read_values,
    run_with_timeout,
)
from grpo_mp.rewards.math import answer_numbers
from grpo_mp.rewards.reward_model import Decode, Server, StepModelClient
from grpo_mp.rewards.settings import DATA_SET, EPISODE, STEPS, RewardConfig
from grpo_mp.rewards.terms import BuiltInTerms
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Sample, SampleGroup, StepRewards

SHOWN_CHARACTERS = 300
CORRECT_FROM = 1.0  # smallest value of the term `correct` that counts as correct
Extras = dict[str, list[Any]]  # values passed to `log_extra` for one group, by column
Results = dict[str, tuple[Values, Set[int]]]  # by term: one value per sample, indices of the failed samples


@dataclass
class RewardStats:
    """Counts since the last call of `Scorer.take_stats`."""

    failures: Counter[str] = field(default_factory=Counter)  # failed calls by term; one call scores one group
    first_errors: dict[str, str] = field(default_factory=dict)  # first failure of each term, as a sentence
    unscored: int = 0  # samples without a reward
    values: dict[str, list[float]] = field(default_factory=dict)  # values passed to `log_metric`, by name

    @property
    def logged(self) -> dict[str, float]:
        """Mean of the values passed to `log_metric`, by name. Sorting makes it independent of their order."""
        return {name: sum(sorted(values)) / len(values) for name, values in sorted(self.values.items())}

    def log(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {
            "failures": dict(self.failures),
            "first_errors": self.first_errors,
            "unscored": self.unscored,
            "logged": self.logged,
        }


def sum_stats(all_stats: Iterable[RewardStats]) -> RewardStats:
    """Merge statistics; of several errors of one term, the first is kept."""
    merged = RewardStats()
    for stats in all_stats:
        merged.failures.update(stats.failures)
        merged.first_errors = stats.first_errors | merged.first_errors
        merged.unscored += stats.unscored
        for name, values in stats.values.items():
            merged.values.setdefault(name, []).extend(values)
    return merged


class Scorer:
    """Computes the rewards of sample groups. `score_group` is thread-safe."""

    def __init__(
        self,
        settings: RewardConfig,
        max_response_tokens: int,
        prompt_column: str = "prompt",
        max_steps: int = 0,
        decode: Decode | None = None,
        set_weights: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Load the user's reward functions.

        decode: of the policy's tokenizer, needed for a served process reward model; set_weights: by name of a data set,
        the weights of its reward terms; prompts of other data sets have the weights of the settings.
        """
        self._settings = settings
        self._prompt_column = prompt_column
        self._max_steps = max_steps
        self._stats = RewardStats()
        self._lock = threading.Lock()
        step_model = settings.model if not settings.outcome_model else None
        self._step_model = StepModelClient(step_model, decode) if step_model and decode else None
        function = settings.steps_function
        self._step_reward = STEP_REWARDS.resolve(function, "reward.steps") if function else None
        names = settings.function_names
        self._functions = {names[spec]: REWARDS.resolve(spec, "reward.functions") for spec in settings.functions}
        self.term_weights = settings.weights
        self._set_weights = {name: settings.with_correct(weights) for name, weights in (set_weights or {}).items()}
        used = {*self.term_weights, *(term for weights in self._set_weights.values() for term in weights)}
        self._built_in = BuiltInTerms(settings, max_response_tokens, used - self._functions.keys())
        self._own_models = frozenset(settings.own_models)  # served by the job itself
        self.defers = bool(self._own_models)  # whether `finish_group` must follow `score_group`

    @property
    def warnings(self) -> tuple[str, ...]:
        missing = "no reward term defines correctness, so there is no accuracy: name one by reward.correct"
        return () if self._settings.correct_term else (missing,)

    @property
    def has_answers(self) -> bool:
        """Whether correctness is decided by comparing answers, so that samples can vote on an answer (maj@n)."""
        return self._settings.correct_term == "answer"

    def answer_numbers(self, group: SampleGroup) -> list[int | None]:
        """Return the number of each sample's answer, equal for equal answers; None for a sample without an answer."""
        responses = [sample.text for sample in group.samples]
        return answer_numbers(responses, self._built_in.verifier, self._settings.boxed_answer)

    def score_group(self, group: SampleGroup, step: int = 0) -> SampleGroup:
        """Return the group with rewards. `reward` is the weighted sum of the unweighted `reward_terms` that apply.

        `finish_group` adds the reward models that the job serves; until then, NaN is the reward of a sample with a
        failed term.

        A sample is not scored (`is_scored`) if no term applies to it, or if a term failed under `on_error: skip`: its
        advantage is 0, means, deviations and filters leave it out, and its reward shows the mean of its group. Rewards
        of steps are in `step_rewards`; `reward_terms` shows their mean. `is_correct` is None if the term that decides
        it failed or does not apply.
        """
        extras: Extras = {}
        weights = self._weights(group)
        results: Results = {
            name: self._values(name, group, step, extras) for name in weights if name not in self._own_models
        }
        verdicts = _verdicts(results, self._settings.correct_term_of(weights), len(group.samples))
        all_steps = [()] * len(group.samples) if STEPS in self._own_models else self._steps(group, step, extras)
        final_extras = dict(extras)  # a call that took too long may still write into `extras`
        samples = (
            replace(
                sample,
                reward=0.0,
                reward_terms={},
                extra={column: values[i] for column, values in final_extras.items()},
                is_correct=verdict,
            )
            for i, (sample, verdict) in enumerate(zip(group.samples, verdicts, strict=True))
        )
        scored = self._with_results(replace(group, samples=tuple(samples)), weights, results, all_steps)
        return scored if self.defers else self._fill_in(scored, weights)

    def finish_group(self, group: SampleGroup, step: int = 0) -> SampleGroup:
        """Complete a group of `score_group` with the values of the reward models that the job serves."""
        weights = self._weights(group)
        results = {name: self._values(name, group, step, {}) for name in weights if name in self._own_models}
        scores_steps = STEPS in self._own_models
        all_steps = self._steps(group, step, {}) if scores_steps else [sample.step_rewards for sample in group.samples]
        return self._fill_in(self._with_results(group, weights, results, all_steps), weights)

    def _weights(self, group: SampleGroup) -> Mapping[str, float]:
        name = group.prompt.columns.get(DATA_SET)  # a user's column of this name may hold anything
        return self._set_weights.get(name, self.term_weights) if isinstance(name, str) else self.term_weights

    def _with_results(
        self, group: SampleGroup, weights: Mapping[str, float], results: Results, all_steps: Sequence[StepRewards]
    ) -> SampleGroup:
        """Add reward terms to the samples; the reward is NaN if a term failed and `on_error` gives no default."""
        failed = {i for _, indices in results.values() for i in indices} if self._default is None else set[int]()
        samples = []
        for i, (sample, steps) in enumerate(zip(group.samples, all_steps, strict=True)):
            terms = {name: value for name, (values, _) in results.items() if (value := values[i]) is not None}
            total = math.nan if i in failed else float(sum(weights[name] * value for name, value in terms.items()))
            shown = {**sample.reward_terms, **terms, **_mean_of(sample, steps)}
            samples.append(replace(sample, reward=sample.reward + total, reward_terms=shown, step_rewards=steps))
        return replace(group, samples=tuple(samples))

    def _fill_in(self, group: SampleGroup, weights: Mapping[str, float]) -> SampleGroup:
        """Give samples without a reward the mean reward of their group, and mark them as not scored."""
        has_reward = [
            bool(sample.reward_terms.keys() & weights.keys()) and not math.isnan(sample.reward)
            for sample in group.samples
        ]
        rewards = [sample.reward for sample, counts in zip(group.samples, has_reward, strict=True) if counts]
        mean = statistics.fmean(rewards or [0.0])
        with self._lock:
            self._stats.unscored += has_reward.count(False) if weights else 0
        filled = (
            sample if counts else replace(sample, reward=mean, is_scored=not weights)
            for sample, counts in zip(group.samples, has_reward, strict=True)
        )
        return replace(group, samples=tuple(filled))

    def connect_model(self, name: str, servers: Sequence[Server]) -> None:
        """Set the servers, which the job has started, of a model of `RewardConfig.own_models`."""
        if client := {"model": self._built_in.model, STEPS: self._step_model}[name]:
            client.connect(servers)

    def take_stats(self) -> RewardStats:
        """Return this rank's statistics since the last call, and reset them."""
        with self._lock:
            stats = self._stats
            self._stats = RewardStats()
        return stats

    def with_own_stats(self) -> "Scorer":
        """Return a copy of this scorer with separate statistics."""
        other = copy(self)
        other._stats = RewardStats()
        return other

    def for_evaluation(self, max_response_tokens: int) -> "Scorer":
        """Return a copy with separate statistics and its own limit of response tokens.

        The copy has no reward models that the job serves: they sleep during evaluations.
        """
        other = self.with_own_stats()
        other._built_in = self._built_in.with_limit(self._settings, max_response_tokens)
        other.defers = False
        other.term_weights = {
            name: weight for name, weight in self.term_weights.items() if name not in self._own_models
        }
        return other

    def close(self) -> None:
        self._built_in.close()
        if self._step_model:
            self._step_model.close()

    def _values(self, name: str, group: SampleGroup, step: int, extras: Extras) -> tuple[Values, Set[int]]:
        def call() -> Values:
            if name in self._built_in.values:
                return read_values(self._built_in.values[name](group), group)
            function = self._functions[name]
            arguments = self._arguments(group, step, extras)
            return self._in_time(lambda: read_values(call_reward(function, arguments), group))

        result = self._attempt(name, group, call)
        if not isinstance(result, RewardError):
            return result, frozenset()
        indices = range(len(group.samples))
        return [result.scored.get(i, self._default) for i in indices], set(indices) - result.scored.keys()

    def _steps(self, group: SampleGroup, step: int, extras: Extras) -> list[StepRewards]:
        def call() -> list[StepRewards]:
            if self._settings.steps == EPISODE:
                return [sample.step_rewards for sample in group.samples]
            if self._step_model:
                return read_steps(self._step_model.score_steps(group), group)
            if self._step_reward is None:
                return [()] * len(group.samples)
            function = self._step_reward
            arguments = self._arguments(group, step, extras)
            return self._in_time(lambda: read_steps(call_reward(function, arguments), group))

        result = self._attempt(STEPS, group, call)
        default = self._default
        if not isinstance(result, RewardError):
            return result
        return [() if default is None else ((len(sample.tokens) - 1, default),) for sample in group.samples]

    def _in_time(self, call: Callable[[], T]) -> T:
        return run_with_timeout(call, self._settings.timeout_s)

    def _attempt(self, name: str, group: SampleGroup, call: Callable[[], T]) -> T | RewardError:
        """Return the result of `call`; if it fails, stop the run or return the error, by `reward.on_error`."""
        try:
            return call()
        except RewardError as failure:
            text = group.samples[failure.sample].text
            excerpt = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
            sentence = (
                f"reward {name}: prompt {group.prompt.index}: {failure}; sample {failure.sample}: {excerpt!r}; "
                "fix the reward, or set reward.on_error to skip or to the score of a failing call"
            )
            if self._settings.on_error == "stop":
                raise UserError(sentence) from failure
            with self._lock:
                self._stats.failures[name] += 1
                self._stats.first_errors.setdefault(name, sentence)
            return failure

    @property
    def _default(self) -> float | None:
        on_error = self._settings.on_error
        return None if isinstance(on_error, str) else on_error

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

        from transformers import TrainerState  # imported here because it imports peft, where that is installed

        state = TrainerState(global_step=step, max_steps=self._max_steps)
        return call_arguments(
            group, self._prompt_column, trainer_state=state, log_extra=log_extra, log_metric=log_metric
        )


def _verdicts(results: Results, term: str | None, count: int) -> list[bool | None]:
    """Return whether each sample is correct; None if the term that decides it failed or does not apply."""
    if term not in results:
        return [None] * count
    values, failed = results[term]  # the default value of a failed call says nothing about correctness
    return [None if value is None or i in failed else value >= CORRECT_FROM for i, value in enumerate(values)]


def _mean_of(sample: Sample, steps: StepRewards) -> dict[str, float]:
    rewards = [reward for of_one in (*(part.step_rewards for part in sample.earlier), steps) for _, reward in of_one]
    return {STEPS: statistics.fmean(rewards)} if rewards else {}
