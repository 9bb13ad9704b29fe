"""Which samples of an update are packed together because they share a prompt. Pure."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil

from grpo_mp.batching.microbatches import Cost, MicroBatchPlan, Schedule, SharedPrompt


@dataclass(frozen=True)
class PromptOf:
    """The prompt of a sample: samples with the same key have the same `tokens` tokens before their response."""

    key: Hashable
    tokens: int


@dataclass(frozen=True)
class Unit:
    """Samples of one prompt that are packed as one. `shared`: tokens of the prompt that are packed once.

    The prompt's last token stays with each sample: it predicts the response's first.
    """

    samples: tuple[int, ...]
    shared: int
    lengths: tuple[int, ...]  # padded, of each sample without what it shares
    prompt_length: int  # padded

    @property
    def tokens(self) -> int:
        return self.prompt_length + sum(self.lengths)

    def cost(self, cost: Cost) -> float:
        """Time of the unit: every token of a sample sees the shared ones, too."""
        return cost.of(self.prompt_length) + sum(cost.of(length, before=self.shared) for length in self.lengths)


def make_units(
    lengths: Sequence[int], prompts: Sequence[PromptOf], data_parallel: int, max_tokens: int, align: int
) -> list[Unit]:
    """Divide samples by prompt, and those of one prompt further where they would not fit a micro-batch, or where too
    few prompts would leave data-parallel ranks without work: there are at least two units for each rank.
    """
    by_key: dict[Hashable, list[int]] = {}
    for sample, prompt in enumerate(prompts):
        by_key.setdefault(prompt.key, []).append(sample)
    parts = ceil(2 * data_parallel / len(by_key)) if by_key and data_parallel > 1 else 1
    units = []
    for samples in by_key.values():
        whole = _unit(samples, lengths, prompts, align)
        limit = min(max_tokens, whole.prompt_length + ceil(sum(whole.lengths) / parts))
        units += _divide(whole, lengths, prompts, limit, align)
    return units


def unpack_units(schedule: Schedule, units: Sequence[Unit]) -> Schedule:
    """The schedule of units as one of samples."""
    return Schedule(
        tuple(tuple(_plan([units[i] for i in plan.samples]) for plan in rank) for rank in schedule.ranks),
        schedule.align,
    )


def _plan(units: Sequence[Unit]) -> MicroBatchPlan:
    return MicroBatchPlan(
        samples=tuple(sample for unit in units for sample in unit.samples),
        lengths=tuple(length for unit in units for length in unit.lengths),
        prompts=tuple(SharedPrompt(len(unit.samples), unit.shared, unit.prompt_length) for unit in units),
    )


def _unit(samples: Sequence[int], lengths: Sequence[int], prompts: Sequence[PromptOf], align: int) -> Unit:
    shared = prompts[samples[0]].tokens - 1 if len(samples) > 1 else 0
    parts = tuple(_aligned(lengths[sample] - shared, align) for sample in samples)
    return Unit(tuple(samples), shared, parts, _aligned(shared, align))


def _divide(unit: Unit, lengths: Sequence[int], prompts: Sequence[PromptOf], limit: int, align: int) -> list[Unit]:
    """Parts of at most `limit` tokens, longest samples first; a sample may be longer than that alone."""
    if unit.tokens <= limit or len(unit.samples) == 1:
        return [unit]
    parts: list[list[int]] = []
    room: list[int] = []
    for length, sample in sorted(zip(unit.lengths, unit.samples, strict=True), reverse=True):
        part = next((i for i, left in enumerate(room) if length <= left), None)
        if part is None:
            part = len(parts)
            parts.append([])
            room.append(limit - unit.prompt_length)
        parts[part].append(sample)
        room[part] -= length
    return [_unit(sorted(part), lengths, prompts, align) for part in parts]


def _aligned(tokens: int, align: int) -> int:
    return -(-tokens // align) * align
