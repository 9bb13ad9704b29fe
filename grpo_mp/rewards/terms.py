"""The parts that need no function of the user: rules, the reward model, and unit tests for code."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_mp.errors import UserError
from grpo_mp.rewards.code import CodeTests
from grpo_mp.rewards.length import length_part, overlong_part, repetition_part
from grpo_mp.rewards.math import answer_numbers, answer_part, boxed_part
from grpo_mp.rewards.math_verify_worker import Equality
from grpo_mp.rewards.model import ModelClient
from grpo_mp.rewards.settings import Reward as RewardSettings
from grpo_mp.rewards.timeouts import Values
from grpo_mp.types import Sample, SampleGroup

EQUALITY_LIMIT_S = 5.0


@dataclass(frozen=True)
class RewardTerm:
    """One named reward: values for a group, at a step."""

    name: str
    weight: float
    values: Callable[[SampleGroup, int], Values]


class BuiltIn:
    """The parts of the settings that have a weight, and the processes and connections behind them."""

    def __init__(self, settings: RewardSettings, max_response_tokens: int) -> None:
        """Raises UserError where programs cannot be shut in as `reward.code` demands."""
        self.equality = Equality(min(EQUALITY_LIMIT_S, settings.timeout_s), settings.tolerance)
        self._which = settings.boxed_answer
        self._model = ModelClient(settings.model) if settings.model else None
        rules = _rules(settings, max_response_tokens)
        says_right = settings.right.part if settings.right else None  # watched at weight 0, too
        parts = [RewardTerm("answer", settings.answer, self._answers), *rules]
        if settings.model and self._model:
            parts.append(RewardTerm("model", settings.model.weight, self._model.values))
        wants_code = settings.code and (settings.code.weight or says_right == "code")
        self._code = CodeTests(settings.code) if settings.code and wants_code else None
        if settings.code and self._code:
            parts.append(RewardTerm("code", settings.code.weight, self._code.values))
        self.parts = [part for part in parts if part.weight or part.name == says_right]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before the run goes on."""
        if self._code and not self._code.isolated:
            return ("reward.code: this kernel gives no namespaces, so programs run with limits only",)
        return ()

    def answer_numbers(self, group: SampleGroup) -> list[int | None]:
        """Which answer each sample gives; see rewards/math.py."""
        return answer_numbers([sample.text for sample in group.samples], self.equality, self._which)

    def close(self) -> None:
        """End the process that compares answers and the connections to the reward model."""
        self.equality.close()
        if self._model:
            self._model.close()

    def _answers(self, group: SampleGroup, step: int) -> Values:
        answer = group.prompt.answer
        if answer is None:
            raise UserError("reward.answer: the prompts have no answer: set data.answer to its column")
        return [answer_part(sample.text, answer, self.equality, self._which) for sample in group.samples]


def _rules(settings: RewardSettings, limit: int) -> list[RewardTerm]:
    overlong, repetition = settings.overlong, settings.repetition
    buffer = overlong.buffer_tokens or max(1, limit // 5)
    return [
        _rule("boxed", settings.boxed, lambda one: boxed_part(one.text)),
        _rule("length", settings.length, lambda one: length_part(len(one.tokens), limit)),
        _rule(
            "overlong", overlong.weight * settings.span / 2, lambda one: overlong_part(len(one.tokens), limit, buffer)
        ),
        _rule("repetition", repetition.weight, lambda one: repetition_part(one.tokens, repetition.ngram)),
    ]


def _rule(name: str, weight: float, value: Callable[[Sample], float]) -> RewardTerm:
    def values(group: SampleGroup, step: int) -> Values:
        return [value(sample) for sample in group.samples]

    return RewardTerm(name, weight, values)
