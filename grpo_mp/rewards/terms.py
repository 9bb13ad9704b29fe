"""The built-in reward terms: rules, reward model, judge, and unit tests of code."""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial

from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.code import CodeTests
from grpo_mp.rewards.language import LANGUAGES, script_share
from grpo_mp.rewards.math import MathVerifier, answer_reward, boxed_answer
from grpo_mp.rewards.reward_model import Judge, ModelClient
from grpo_mp.rewards.settings import THINK_TAGS, RewardConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import has_column, read_column
from grpo_mp.utils.types import Sample, SampleGroup

COMPARISON_LIMIT_S = 5.0
GroupValues = Callable[[SampleGroup], Values]


class BuiltInTerms:
    """The built-in terms in use, with their processes and connections."""

    def __init__(self, settings: RewardConfig, max_response_tokens: int, used: Collection[str]) -> None:
        """Build the terms whose names are in `used`."""
        self.verifier = MathVerifier(min(COMPARISON_LIMIT_S, settings.timeout_s))
        self._boxed_choice = settings.boxed_answer
        self.model = ModelClient(settings.model) if settings.model and "model" in used else None
        self._judge = Judge(settings.judge) if settings.judge and "judge" in used else None
        code = CodeTests(settings.code) if settings.code and "code" in used else None
        terms: dict[str, GroupValues] = {"answer": self._answers, **_rules(settings, max_response_tokens)}
        terms["language"] = partial(_language_shares, settings)
        terms |= {
            name: part.values for name, part in (("model", self.model), ("judge", self._judge), ("code", code)) if part
        }
        self.values = {name: values for name, values in terms.items() if name in used}  # name -> function of a group

    def with_limit(self, settings: RewardConfig, max_response_tokens: int) -> "BuiltInTerms":
        """Return a copy with the same processes and connections, for another limit of response tokens."""
        other = copy(self)
        rules = _rules(settings, max_response_tokens)
        other.values = {name: rules.get(name, values) for name, values in self.values.items()}
        return other

    def close(self) -> None:
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
    buffer = settings.overlong.buffer_tokens or max(1, max_response_tokens // 5)
    return {
        "episode": _by_sample(lambda sample: sample.episode_reward),
        "boxed": _by_sample(lambda sample: float(boxed_answer(sample.text) is not None)),
        "think": _by_sample(lambda sample: think_format(sample.text, THINK_TAGS, settings.think.opened)),
        "overlong": _by_sample(lambda sample: overlong_penalty(len(sample.tokens), max_response_tokens, buffer)),
        "repetition": _by_sample(lambda sample: repetition_penalty(sample.tokens)),
    }


def _by_sample(value: Callable[[Sample], float | None]) -> GroupValues:
    return lambda group: [value(sample) for sample in group.samples]


def think_format(text: str, tags: tuple[str, str], opened: bool = False) -> float:
    """Return 1 if a response is one thinking part between the tags, then an answer, both not blank; else 0.

    DeepSeek-R1's format reward (arXiv 2501.12948, 2.2.2). `opened`: the prompt ends with the opening tag.
    """
    first, last = tags
    body = text.lstrip()
    if not opened and not body.startswith(first):
        return 0.0
    thinking, closing, answer = body.removeprefix("" if opened else first).partition(last)
    is_once = first not in thinking + answer and last not in answer
    return float(bool(closing and is_once and thinking.strip() and answer.strip()))


def _language_shares(settings: RewardConfig, group: SampleGroup) -> Values:
    """Return for each response the share of its words up to the closing tag that are in the target language's script.

    DeepSeek-R1's language consistency (arXiv 2501.12948, 2.3.2).
    """
    language = settings.language
    (first, last) = THINK_TAGS
    target: object = language.target
    if language.column:
        columns = group.prompt.columns
        target = read_column(columns, language.column) if has_column(columns, language.column) else None
    if not isinstance(target, str) or target not in LANGUAGES:
        raise RewardError(f"reward.language.column {language.column}: {target!r:.40} is no known language, such as en")
    thinking = (sample.text.partition(last)[0].replace(first, " ") for sample in group.samples)
    return [script_share(text, LANGUAGES[target]) for text in thinking]


def overlong_penalty(tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """Compute the soft overlong punishment: 0 up to the buffer, then linearly down to -1 at the limit.

    DAPO (arXiv 2503.14476), eq. 13, with L_max = max_response_tokens and L_cache = buffer_tokens.
    """
    return min(0.0, max(-1.0, (max_response_tokens - buffer_tokens - tokens) / buffer_tokens))


def repetition_penalty(tokens: Sequence[int], ngram: int = 4) -> float:
    """Return minus the share of n-grams in `tokens` that repeat an earlier one; 0 for fewer than n tokens.

    Yeo et al. (arXiv 2502.03373, appendix) give the penalty to the tokens of each repeated n-gram instead.
    """
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0
