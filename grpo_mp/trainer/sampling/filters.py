"""Filters of `sample.filters`, which select the answers to keep."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from grpo_mp.config.registries import SAMPLE_FILTERS
from grpo_mp.utils.errors import UserError, refuse_failures
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SampleFilter(Protocol):
    """Returns for each sample whether to keep it; arguments from `sample.filters` are passed by name.

    `samples`: the answers that earlier filters kept, at least one, in order of index. A filter may also be a class: it
    is instantiated once with the arguments. A filter must be deterministic.
    """

    def __call__(self, prompt: Prompt, samples: Sequence[Sample], /) -> Sequence[bool]: ...


@dataclass(frozen=True, config=STRICT)
class Right:
    """Keeps right answers, as judged by the reward term `reward.correct`."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        return [sample.is_correct is True for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Best:
    """Keeps the `k` samples with the highest reward; ties go to the shorter answer, then to the lower index.

    Samples whose scoring failed are dropped.
    """

    k: Annotated[int, Field(gt=0)] = 1

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        scored = [sample for sample in samples if sample.is_scored]
        ordered = sorted(scored, key=lambda sample: (-sample.reward, response_tokens(sample), sample.index))
        best = {sample.index for sample in ordered[: self.k]}
        return [sample.index in best for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Tokens:
    """Keeps responses with at least `min` and at most `max` generated tokens."""

    min: Annotated[int, Field(ge=0)] = 0
    max: Annotated[int, Field(ge=0)] | None = None

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        lengths = [response_tokens(sample) for sample in samples]
        return [length >= self.min and (self.max is None or length <= self.max) for length in lengths]


@dataclass(frozen=True, config=STRICT)
class Complete:
    """Keeps responses that were not truncated, and episodes that did not fail."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        return [not sample.truncated and sample.state in (None, "completed") for sample in samples]


@dataclass(frozen=True, config=STRICT)
class Distinct:
    """Keeps the first of several equal answers to a prompt; differences in whitespace are ignored."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[bool]:
        texts = [_without_blanks(sample) for sample in samples]
        return [text not in texts[:number] for number, text in enumerate(texts)]


def response_tokens(sample: Sample) -> int:
    """Count the tokens that the policy generated, over all sequences of an episode."""
    return sum(len(sequence.tokens) - sequence.given_tokens for sequence in sample.sequences)


def _without_blanks(sample: Sample) -> str:
    if not sample.messages:
        return " ".join(sample.text.split())
    messages = [
        {name: " ".join(value.split()) if isinstance(value, str) else value for name, value in message.items()}
        for message in sample.messages
    ]
    return json.dumps(messages, sort_keys=True, default=str)


def load_sample_filters(
    filters: Mapping[str, Mapping[str, Any]], group_size: int, knows_correct: bool
) -> dict[str, SampleFilter]:
    """Return the filters of the settings by name, in order. `knows_correct`: a reward term defines correctness."""
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
        raise UserError(f"{setting}: {'.'.join(map(str, found['loc']))}: {found['msg']}") from error
    return keeps


def apply_filters(group: SampleGroup, filters: Mapping[str, SampleFilter], dropped: Counter[str]) -> tuple[Sample, ...]:
    """Return the samples that all filters keep; count what each filter drops."""
    samples = group.samples
    for name, keeps in filters.items():
        if not samples:
            break
        with refuse_failures(f"sample.filters.{name}: prompt {group.prompt.index}: it failed"):
            verdicts = list(keeps(group.prompt, samples))
        if len(verdicts) != len(samples) or not all(isinstance(verdict, bool) for verdict in verdicts):
            raise UserError(
                f"sample.filters.{name}: prompt {group.prompt.index}: it returned {verdicts!r:.100}: return true or "
                f"false for each of the {len(samples)} samples"
            )
        kept = tuple(sample for sample, keep in zip(samples, verdicts, strict=True) if keep)
        dropped[name] += len(samples) - len(kept)
        samples = kept
    return samples
