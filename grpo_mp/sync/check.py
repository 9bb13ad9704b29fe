"""The engine is not trusted: after a sync its logprobs of fixed tokens must be the policy's. Pure parts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "fp8": 0.25}  # mean |engine - policy|, nats; of fp8 not measured yet
# Where two experts' scores are equal but for rounding, policy and engine may choose differently: every weight is
# right, and that one token is far off, by up to a nat. So many sets are looked at then, each without its farthest
# token: a wrong tensor is seen by more than one token of each.
WIDER_SETS = 32


@dataclass(frozen=True)
class CheckReport:
    """How far an engine is from the policy on `tokens` tokens, in nats."""

    mean: float
    largest: float
    tokens: int

    def passes(self, tolerance: float) -> bool:
        """Whether the mean over all tokens is within the tolerance; False also where a value is not a number."""
        return self.mean <= tolerance


def fixed_sequences(
    vocabulary: int, longest: int, seed: int, prompts: Sequence[tuple[int, ...]] = (), count: int = 4
) -> tuple[tuple[int, ...], ...]:
    """Token sequences to compare on: real prompts, and random ones that visit the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    length = max(2, min(longest, 64))
    random = torch.randint(0, vocabulary, (count, length), generator=generator).tolist()
    return (*(prompt for prompt in prompts[:count] if 2 <= len(prompt) <= longest), *map(tuple, random))


def compare(engine: Sequence[Sequence[float]], policy: Sequence[Sequence[float]]) -> CheckReport:
    """Compare logprobs of the same tokens; raises ValueError where the shapes differ or there is no token."""
    if [len(sequence) for sequence in engine] != [len(sequence) for sequence in policy]:
        raise ValueError("engine and policy scored different numbers of tokens")
    flat = [[value for sequence in side for value in sequence] for side in (engine, policy)]
    if not flat[0]:
        raise ValueError("there is no token to compare engine and policy on")
    apart = torch.tensor(flat[0], dtype=torch.float64).sub(torch.tensor(flat[1], dtype=torch.float64)).abs()
    return CheckReport(float(apart.mean()), float(apart.max()), len(apart))


def pooled(reports: Sequence[CheckReport]) -> CheckReport:
    """The report on all the tokens of several."""
    tokens = sum(report.tokens for report in reports)
    mean = sum(report.mean * report.tokens for report in reports) / tokens
    return CheckReport(mean, max(report.largest for report in reports), tokens)


def trimmed_mean(reports: Sequence[CheckReport]) -> float:
    """The mean over the tokens of several reports, each without its farthest one; not a number where one is none."""
    total = sum(report.mean * report.tokens - report.largest for report in reports)
    return total / sum(report.tokens - 1 for report in reports)


def worst(reports: Sequence[CheckReport]) -> CheckReport:
    """The largest values of several engines' reports on the same tokens."""
    return CheckReport(
        max(report.mean for report in reports), max(report.largest for report in reports), reports[0].tokens
    )
