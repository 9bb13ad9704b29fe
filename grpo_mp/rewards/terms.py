"""The built-in terms of the reward: rules, reward model, judge, and unit tests for code."""

from collections.abc import Callable, Collection, Sequence

from grpo_mp.errors import UserError
from grpo_mp.rewards.base import Values
from grpo_mp.rewards.code import CodeTests
from grpo_mp.rewards.judge import Judge
from grpo_mp.rewards.math import answer_reward, boxed_answer
from grpo_mp.rewards.math_verify_worker import MathVerifier
from grpo_mp.rewards.reward_model import ModelClient
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.types import Sample, SampleGroup

COMPARISON_LIMIT_S = 5.0
GroupValues = Callable[[SampleGroup], Values]


class BuiltInTerms:
    """The built-in terms that are used, and the processes and connections behind them."""

    def __init__(self, settings: RewardConfig, max_response_tokens: int, used: Collection[str]) -> None:
        """Build the terms whose names are in `used`.

        Raises UserError where programs cannot be isolated as `reward.code` demands, a key is missing, or a cache fails.
        """
        self.verifier = MathVerifier(min(COMPARISON_LIMIT_S, settings.timeout_s), settings.tolerance)
        self._boxed_choice = settings.boxed_answer
        self.model = ModelClient(settings.model) if settings.model and "model" in used else None
        self._judge = Judge(settings.judge) if settings.judge and "judge" in used else None
        code = CodeTests(settings.code) if settings.code and "code" in used else None
        terms: dict[str, GroupValues] = {"answer": self._answers, **_rules(settings, max_response_tokens)}
        terms |= {
            name: part.values for name, part in (("model", self.model), ("judge", self._judge), ("code", code)) if part
        }
        self.values = {name: values for name, values in terms.items() if name in used}  # by name, of a group
        self.warnings: tuple[str, ...] = ()
        if code and not code.sandbox.isolated:
            self.warnings = ("reward.code: this kernel gives no namespaces, so programs run with limits only",)

    def close(self) -> None:
        """End the process that compares answers and the connections."""
        self.verifier.close()
        if self.model:
            self.model.close()
        if self._judge:
            self._judge.close()

    def _answers(self, group: SampleGroup) -> Values:
        answer = group.prompt.answer
        if answer is None:
            raise UserError("reward.answer: the prompts have no answer: set data.answer_column to its column")
        return [answer_reward(sample.text, answer, self.verifier, self._boxed_choice) for sample in group.samples]


def _rules(settings: RewardConfig, max_response_tokens: int) -> dict[str, GroupValues]:
    ngram, buffer = settings.repetition.ngram, settings.overlong.buffer_tokens or max(1, max_response_tokens // 5)
    return {
        "episode": _by_sample(lambda sample: sample.episode_reward),
        "boxed": _by_sample(lambda sample: float(boxed_answer(sample.text) is not None)),
        "length": _by_sample(lambda sample: min(1.0, len(sample.tokens) / max_response_tokens)),
        "overlong": _by_sample(lambda sample: overlong_penalty(len(sample.tokens), max_response_tokens, buffer)),
        "repetition": _by_sample(lambda sample: repetition_penalty(sample.tokens, ngram)),
    }


def _by_sample(value: Callable[[Sample], float | None]) -> GroupValues:
    """Score a group by a function that scores one sample."""
    return lambda group: [value(sample) for sample in group.samples]


def overlong_penalty(tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """Compute the soft overlong punishment: 0 up to the buffer, then linearly down to -1 at the limit.

    DAPO (arXiv 2503.14476), eq. 13, with L_max = max_response_tokens and L_cache = buffer_tokens.
    """
    return min(0.0, max(-1.0, (max_response_tokens - buffer_tokens - tokens) / buffer_tokens))


def repetition_penalty(tokens: Sequence[int], ngram: int) -> float:
    """Return -(share of n-grams that occurred before in `tokens`): 0 without repetition or below n tokens, above -1.

    Counts the same n-grams as the penalty of Yeo et al. (arXiv 2502.03373, appendix), who give it to the tokens of
    each repeated n-gram; as one number for the whole response it is this project's definition.
    """
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0
