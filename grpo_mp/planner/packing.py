"""Micro-batches of an update as the trainer itself packs them, for assumed response lengths."""

from dataclasses import dataclass
from functools import lru_cache
from math import exp
from statistics import NormalDist, fmean

from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import padded_size, plan_update
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.planner.overheads import OVERHEADS


@dataclass(frozen=True)
class AssumedLengths:
    """Tokens of the samples of an update: `mean` and `limit` are of the responses."""

    num_samples: int
    prompt_tokens: int
    mean: float
    limit: int
    samples_per_prompt: int = 0  # that share one prompt; 0: each computes its own


@dataclass(frozen=True)
class Packing:
    """Micro-batches of one data-parallel rank.

    `load_factor`: tokens that the busiest rank computes over its fair share of all samples' tokens. Padding and
    imbalance raise it, shared prompts lower it.
    """

    microbatches: int
    load_factor: float


@lru_cache(maxsize=1024)
def pack_update(
    lengths: AssumedLengths, layout: LayoutConfig, dp_size: int, max_tokens: int, hidden_size: int
) -> Packing:
    """Plan one update of these lengths. Pure."""
    tokens = [lengths.prompt_tokens + response for response in response_lengths(lengths)]
    prompts: list[SamplePrompt] = []
    if lengths.samples_per_prompt:  # every prompt gets short and long responses
        num_prompts = -(-lengths.num_samples // lengths.samples_per_prompt)
        prompts = [SamplePrompt(sample % num_prompts, lengths.prompt_tokens) for sample in range(lengths.num_samples)]
    schedule = plan_update(tokens, layout, dp_size, max_tokens, hidden_size, prompts)
    size = padded_size(schedule, layout)
    busiest = size * schedule.microbatches or max(sum(plan.tokens for plan in rank) for rank in schedule.ranks)
    return Packing(schedule.microbatches, busiest * dp_size / sum(tokens))


@lru_cache(maxsize=64)
def response_lengths(lengths: AssumedLengths) -> tuple[int, ...]:
    """Return evenly spaced quantiles of a lognormal distribution, cut off at `limit`, with the mean `mean`."""
    scores = [NormalDist().inv_cdf((number + 0.5) / lengths.num_samples) for number in range(lengths.num_samples)]
    factors = [exp(OVERHEADS.response_log_std * score) for score in scores]

    def responses(median: float) -> list[float]:
        return [min(float(lengths.limit), max(1.0, median * factor)) for factor in factors]

    low, high = 0.0, lengths.limit / factors[0]  # at the highest median all responses have the limit's length
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(responses(middle)) < lengths.mean else (low, middle)
    return tuple(round(length) for length in responses(high))
