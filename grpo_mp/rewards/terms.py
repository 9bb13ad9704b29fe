"""The built-in terms of the reward: rules, the reward model, and unit tests for code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_mp.errors import UserError
from grpo_mp.rewards.code import CodeTests
from grpo_mp.rewards.math import answer_reward, boxed_answer
from grpo_mp.rewards.math_verify_worker import MathVerifier
from grpo_mp.rewards.model import ModelClient
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.timeouts import Values
from grpo_mp.types import Sample, SampleGroup

COMPARISON_LIMIT_S = 5.0


@dataclass(frozen=True)
class RewardTerm:
    """One named term of the reward; `values` scores a group."""

    name: str
    weight: float
    values: Callable[[SampleGroup], Values]


class BuiltInTerms:
    """The built-in terms with a weight, and the processes and connections behind them."""

    def __init__(self, settings: RewardConfig, max_response_tokens: int) -> None:
        """Build the terms. Raises UserError where programs cannot be isolated as `reward.code` demands."""
        self.verifier = MathVerifier(min(COMPARISON_LIMIT_S, settings.timeout_s), settings.tolerance)
        self._boxed_choice = settings.boxed_answer
        self._model = ModelClient(settings.model) if settings.model else None
        correctness_term = settings.correct.term if settings.correct else None  # computed at weight 0, too
        terms = [RewardTerm("answer", settings.answer, self._answers), *_rule_terms(settings, max_response_tokens)]
        if settings.model and self._model:
            terms.append(RewardTerm("model", settings.model.weight, self._model.values))
        needs_code = settings.code and (settings.code.weight or correctness_term == "code")
        self.warnings: tuple[str, ...] = ()
        if settings.code and needs_code:
            code = CodeTests(settings.code)
            terms.append(RewardTerm("code", settings.code.weight, code.values))
            if not code.sandbox.isolated:
                self.warnings = ("reward.code: this kernel gives no namespaces, so programs run with limits only",)
        self.terms = [term for term in terms if term.weight or term.name == correctness_term]

    def close(self) -> None:
        """End the process that compares answers and the connections to the reward model."""
        self.verifier.close()
        if self._model:
            self._model.close()

    def _answers(self, group: SampleGroup) -> Values:
        answer = group.prompt.answer
        if answer is None:
            raise UserError("reward.answer: the prompts have no answer: set data.answer_column to its column")
        return [answer_reward(sample.text, answer, self.verifier, self._boxed_choice) for sample in group.samples]


def _rule_terms(settings: RewardConfig, max_response_tokens: int) -> list[RewardTerm]:
    overlong, repetition, ngram = settings.overlong, settings.repetition, settings.repetition.ngram
    buffer = overlong.buffer_tokens or max(1, max_response_tokens // 5)
    return [
        _sample_term("boxed", settings.boxed, lambda sample: float(boxed_answer(sample.text) is not None)),
        _sample_term("length", settings.length, lambda sample: min(1.0, len(sample.tokens) / max_response_tokens)),
        _sample_term(
            "overlong",
            overlong.weight * settings.span / 2,
            lambda sample: overlong_penalty(len(sample.tokens), max_response_tokens, buffer),
        ),
        _sample_term("repetition", repetition.weight, lambda sample: repetition_penalty(sample.tokens, ngram)),
    ]


def _sample_term(name: str, weight: float, value: Callable[[Sample], float]) -> RewardTerm:
    """Make a term of a function that scores one sample."""
    return RewardTerm(name, weight, lambda group: [value(sample) for sample in group.samples])


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
