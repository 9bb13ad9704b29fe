"""Which answers to a prompt are kept: what `sample.filters` names. Pure."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from grpo_mp.config.registries import SAMPLE_FILTERS
from grpo_mp.rewards.language import LANGUAGES, SCRIPTS, check_language, script_share
from grpo_mp.utils.errors import UserError, did_you_mean, one_line
from grpo_mp.utils.reading import did_you_mean_column, has_column, read_column
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Count = Annotated[int, Field(gt=0)]


class SampleFilter(Protocol):
    """Says which answers to a prompt are kept. Its arguments in `sample.filters` come by name.

    `samples`: those that the filters before have kept, at least one, by index. It may also be a class, of which one
    object is made with the arguments. It must say the same of the same answers.
    """

    def __call__(self, prompt: Prompt, samples: Sequence[Sample], /) -> Sequence[bool]:
        """Return for each sample whether it is kept."""


@dataclass(frozen=True, config=STRICT)
class Right:
    """Keeps right answers: those that the term of `reward.correct` judges so."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether each is right."""
        return [sample.is_correct is True for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Best:
    """Keeps the k of the highest reward; of equal ones the shorter, then the one of the lower index.

    What has no reward of its own, as its scoring failed, is not kept.
    """

    k: Count = 1

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether each is among the best."""
        scored = [sample for sample in samples if sample.is_scored]
        ordered = sorted(scored, key=lambda sample: (-sample.reward, response_tokens(sample), sample.index))
        best = {sample.index for sample in ordered[: self.k]}
        return [sample.index in best for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Reward:
    """Keeps rewards in a range, ends included; None: no end. What has no reward of its own is not kept."""

    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        _check_range(self.min, self.max)

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether the reward of each is in the range."""
        return [sample.is_scored and _within(sample.reward, self.min, self.max) for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Tokens:
    """Keeps responses of some length: tokens that the policy generated, ends included; None: no end."""

    min: Annotated[int, Field(ge=0)] | None = None
    max: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        _check_range(self.min, self.max)

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether the length of each is in the range."""
        return [_within(response_tokens(sample), self.min, self.max) for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Complete:
    """Keeps what ended by itself: not truncated, and of episodes none that failed."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether each is complete."""
        return [not sample.truncated and sample.state in (None, "completed") for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Language:
    """Keeps answers of which at least `min_share` of the words are of the wanted scripts.

    These are some of rewards/language.py's SCRIPTS, or those of each row's own language, which a data `column` names by
    its ISO 639-1 code, as for `reward.language.column`.
    """

    scripts: Annotated[tuple[str, ...] | None, Field(min_length=1, strict=False)] = None
    column: str | None = None
    min_share: Annotated[float, Field(ge=0, le=1)] = 0.9

    def __post_init__(self) -> None:
        if (self.scripts is None) == (self.column is None):
            raise ValueError("give scripts, or the column of each row's language")
        for script in self.scripts or ():
            if script not in SCRIPTS:
                hint = did_you_mean(script.lower(), SCRIPTS)
                raise ValueError(f"unknown script {script[:50]!r}{hint}: there are {', '.join(SCRIPTS)}")

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether each is consistent. Raises ValueError for a row's unknown language."""
        scripts = self.scripts or self._scripts_of(prompt)
        return [script_share(written_text(sample), scripts) >= self.min_share for sample in samples]

    def _scripts_of(self, prompt: Prompt) -> tuple[str, ...]:
        assert self.column is not None
        if not has_column(prompt.columns, self.column):
            hint = did_you_mean_column(self.column, prompt.columns)
            raise ValueError(f"no column {self.column}{hint} says the language")
        return LANGUAGES[check_language(read_column(prompt.columns, self.column))]


@dataclass(frozen=True, config=STRICT)
class Without:
    """Keeps answers in which a regular expression of Python is not found, in any of the turns of an episode."""

    pattern: Annotated[str, Field(min_length=1)]

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"{self.pattern[:50]!r} is no regular expression: {error}") from error

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether it is not in each."""
        return [not re.search(self.pattern, written_text(sample)) for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Distinct:
    """Keeps the first of the answers to a prompt that are the same text but for blanks."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether each is the first of its text."""
        first: dict[str, int] = {}
        for sample in samples:
            first.setdefault(_normalized(sample), sample.index)
        return [first[_normalized(sample)] == sample.index for sample in samples]


@dataclass(frozen=True, config=STRICT)
class First:
    """Keeps the first `count` of a prompt by index, as good as any others of one distribution."""

    count: Count

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        """Return whether each is one of the first."""
        return [number < self.count for number in range(len(samples))]


def response_tokens(sample: Sample) -> int:
    """Return the tokens of a response that the policy generated, of an episode in all its sequences."""
    return sum(len(sequence.tokens) - sequence.given_tokens for sequence in sample.sequences)


def written_text(sample: Sample) -> str:
    """Return what the policy wrote, of an episode in all its turns."""
    turns = [str(message.get("content") or "") for message in sample.messages if message["role"] == "assistant"]
    return "\n".join(turns) if turns else sample.text


def _normalized(sample: Sample) -> str:
    """Return what makes two answers the same: their words, of an episode also its calls and their results."""
    said = _without_blanks(sample.messages or sample.text)
    return json.dumps(said, sort_keys=True, default=str)


def _without_blanks(value: Any) -> Any:
    """Return a tree of messages in which texts that differ in blanks are the same."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return {name: _without_blanks(item) for name, item in value.items()}
    return [_without_blanks(item) for item in value] if isinstance(value, list | tuple) else value


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _check_range(low: float | None, high: float | None) -> None:
    if low is None and high is None:
        raise ValueError("give min, max, or both")
    if low is not None and high is not None and low > high:
        raise ValueError(f"min {low:g} is above max {high:g}: nothing would be kept")


def load_sample_filters(
    filters: Mapping[str, Mapping[str, Any]], group_size: int, knows_correct: bool
) -> dict[str, SampleFilter]:
    """Return the filters of the settings by name, in their order.

    Raises UserError for one that cannot be loaded or called, or that nothing passes with `group_size` answers a prompt.
    """
    loaded = {name: _load(name, arguments) for name, arguments in filters.items()}
    for name, keeps in loaded.items():
        if isinstance(keeps, Best) and keeps.k > group_size:
            raise UserError(
                f"sample.filters.{name}: the best k={keeps.k} of {group_size} answers to a prompt are all: lower k, or "
                "raise --samples (rollout.group_size)"
            )
        if isinstance(keeps, Right) and not knows_correct:
            raise UserError(
                f"sample.filters.{name}: no reward term defines correctness: set reward.correct to the term that does"
            )
    return loaded


def _load(name: str, arguments: Mapping[str, Any]) -> SampleFilter:
    setting = f"sample.filters.{name}"
    try:
        keeps: SampleFilter = SAMPLE_FILTERS.resolve(name, setting, arguments)
    except ValidationError as error:
        found = error.errors()[0]
        argument = "".join(f"{part}: " for part in found["loc"][:1])
        message = found["msg"].removeprefix("Value error, ")
        raise UserError(f"{setting}: {argument}{message[:1].lower()}{message[1:]}") from error
    return keeps


def check_columns(filters: Mapping[str, SampleFilter], prompt: Prompt) -> None:
    """Raise UserError where a filter takes a data column that a prompt's row lacks, or that holds no language."""
    for name, keeps in filters.items():
        if isinstance(keeps, Language):
            try:
                keeps(prompt, ())
            except ValueError as error:
                raise UserError(f"sample.filters.{name}: prompt {prompt.index}: {error}") from error


def apply_filters(group: SampleGroup, filters: Mapping[str, SampleFilter], dropped: Counter[str]) -> tuple[Sample, ...]:
    """Return the samples that all filters keep; count what each drops. Raises UserError where a user's own fails."""
    samples = group.samples
    for name, keeps in filters.items():
        if not samples:
            break
        kept = tuple(
            sample for sample, keep in zip(samples, _call(name, keeps, group.prompt, samples), strict=True) if keep
        )
        dropped[name] += len(samples) - len(kept)
        samples = kept
    return samples


def _call(name: str, keeps: SampleFilter, prompt: Prompt, samples: Iterable[Sample]) -> list[bool]:
    given = tuple(samples)
    try:
        verdicts = list(keeps(prompt, given))
    except Exception as error:
        raise UserError(
            f"sample.filters.{name}: prompt {prompt.index}: it failed: {type(error).__name__}: {one_line(error)}"
        ) from error
    if len(verdicts) != len(given) or not all(isinstance(verdict, bool) for verdict in verdicts):
        raise UserError(
            f"sample.filters.{name}: prompt {prompt.index}: it returned {verdicts!r:.100}: return true or false "
            f"for each of the {len(given)} samples"
        )
    return verdicts
