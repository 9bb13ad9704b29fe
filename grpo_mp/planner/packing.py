"""Micro-batches of an update as the trainer's own scheduler packs them, for lengths that are assumed."""

from dataclasses import dataclass
from functools import lru_cache
from math import exp
from statistics import NormalDist, fmean

from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import padded_size, plan_update
from grpo_mp.config import Layout
from grpo_mp.planner.overheads import OVERHEADS


@dataclass(frozen=True)
class Lengths:
    """Samples of an update: tokens of every prompt, mean and limit of the responses, and how many samples share one
    prompt (0: each computes its own).
    """

    samples: int
    prompt: int
    mean: float
    limit: int
    sharing: int = 0

    @property
    def prompts(self) -> list[SamplePrompt]:
        """By sample, in the order of `responses`: every prompt gets short and long ones."""
        groups = -(-self.samples // self.sharing) if self.sharing else 0
        return [SamplePrompt(sample % groups, self.prompt) for sample in range(self.samples)] if groups else []


@dataclass(frozen=True)
class Packing:
    """`microbatches`: of one data-parallel rank. `padded`: tokens of the busiest rank over its fair share of all
    samples' tokens, which is below 1 where prompts are shared.
    """

    microbatches: int
    padded: float


@lru_cache(maxsize=1024)
def pack_update(lengths: Lengths, layout: Layout, data_parallel: int, max_tokens: int, hidden: int) -> Packing:
    """Plan one update of these lengths. Pure."""
    tokens = [lengths.prompt + response for response in responses(lengths)]
    schedule = plan_update(tokens, layout, data_parallel, max_tokens, hidden, lengths.prompts)
    size = padded_size(schedule, layout)
    busiest = size * schedule.microbatches or max(sum(plan.tokens for plan in rank) for rank in schedule.ranks)
    return Packing(schedule.microbatches, busiest * data_parallel / sum(tokens))


@lru_cache(maxsize=64)
def responses(lengths: Lengths) -> tuple[int, ...]:
    """Equally likely lengths of a lognormal distribution that is cut off at the limit and has the wanted mean."""
    scores = [NormalDist().inv_cdf((number + 0.5) / lengths.samples) for number in range(lengths.samples)]
    shapes = [exp(OVERHEADS.length_spread * score) for score in scores]

    def cut(median: float) -> list[float]:
        return [min(float(lengths.limit), max(1.0, median * shape)) for shape in shapes]

    low, high = 0.0, lengths.limit / shapes[0]  # at the highest median all responses have the limit's length
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(cut(middle)) < lengths.mean else (low, middle)
    return tuple(round(length) for length in cut(high))
