"""Packs samples that share a prompt as one unit that contains the prompt once."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil

from grpo_mp.batching.microbatches import (
    MicroBatchPlan,
    MicroBatchSchedule,
    SharedPrompt,
    compute_cost,
    first_fit,
    round_up,
)


@dataclass(frozen=True)
class SamplePrompt:
    """Prompt of a sample. Samples with equal `key` have the same first `tokens` tokens."""

    key: Hashable
    tokens: int


@dataclass(frozen=True)
class PackingUnit:
    """Samples of one prompt that are packed together. `shared`: prompt tokens packed once.

    The prompt's last token is repeated with each sample, because it predicts the first response token.
    """

    samples: tuple[int, ...]
    shared: int
    lengths: tuple[int, ...]  # padded length of each sample without its shared tokens
    prompt_length: int  # padded

    @property
    def tokens(self) -> int:
        return self.prompt_length + sum(self.lengths)

    def cost(self, hidden_size: int) -> float:
        """Return the time of the unit; every token of a sample also attends to the shared tokens."""
        own = sum(compute_cost(length, hidden_size, self.shared) for length in self.lengths)
        return compute_cost(self.prompt_length, hidden_size) + own


def make_units(
    lengths: Sequence[int], prompts: Sequence[SamplePrompt], dp_size: int, max_tokens: int, align: int
) -> list[PackingUnit]:
    """Make one unit of each prompt's samples, or several if they exceed a micro-batch.

    If there are too few prompts to occupy all data-parallel ranks, units are split to get about two per rank.
    """
    by_key: dict[Hashable, list[int]] = {}
    for sample, prompt in enumerate(prompts):
        by_key.setdefault(prompt.key, []).append(sample)
    parts = ceil(2 * dp_size / len(by_key)) if by_key and dp_size > 1 else 1
    units = []
    for samples in by_key.values():
        unit = _make_unit(samples, lengths, prompts, align)
        limit = min(max_tokens, unit.prompt_length + ceil(sum(unit.lengths) / parts))
        units += _split_unit(unit, lengths, prompts=prompts, limit=limit, align=align)
    return units


def unpack_units(schedule: MicroBatchSchedule, units: Sequence[PackingUnit]) -> MicroBatchSchedule:
    """Convert a schedule of units into a schedule of samples."""
    return MicroBatchSchedule(
        tuple(tuple(_unpack_plan([units[i] for i in plan.samples]) for plan in rank) for rank in schedule.ranks),
        schedule.align,
    )


def _unpack_plan(units: Sequence[PackingUnit]) -> MicroBatchPlan:
    return MicroBatchPlan(
        samples=tuple(sample for unit in units for sample in unit.samples),
        lengths=tuple(length for unit in units for length in unit.lengths),
        prompts=tuple(SharedPrompt(len(unit.samples), unit.shared, unit.prompt_length) for unit in units),
    )


def _make_unit(
    samples: Sequence[int], lengths: Sequence[int], prompts: Sequence[SamplePrompt], align: int
) -> PackingUnit:
    shared = prompts[samples[0]].tokens - 1 if len(samples) > 1 else 0
    parts = tuple(round_up(lengths[sample] - shared, align) for sample in samples)
    return PackingUnit(tuple(samples), shared, parts, round_up(shared, align))


def _split_unit(
    unit: PackingUnit, lengths: Sequence[int], prompts: Sequence[SamplePrompt], limit: int, align: int
) -> list[PackingUnit]:
    """Split a unit by first fit into units of at most `limit` tokens, longest samples first.

    A single sample may exceed the limit.
    """
    if unit.tokens <= limit or len(unit.samples) == 1:
        return [unit]
    sizes = dict(zip(unit.samples, unit.lengths, strict=True))
    longest_first = sorted(unit.samples, key=lambda sample: (sizes[sample], sample), reverse=True)
    parts = first_fit(longest_first, sizes, limit - unit.prompt_length)
    return [_make_unit(sorted(part), lengths, prompts, align) for part in parts]
