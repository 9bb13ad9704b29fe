"""The engine is not trusted: after a sync its logprobs of fixed tokens must be the policy's. Pure parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # mean |engine - policy|, nats


@dataclass(frozen=True)
class CheckReport:
    """How far an engine is from the policy on the fixed tokens, in nats."""

    mean: float
    largest: float
    typical: float  # median over the sequences of the mean inside one

    def passes(self, tolerance: float) -> bool:
        """False also where a value is not a number.

        The typical sequence decides, not the mean over all: where two experts' scores tie, rounding may choose
        another expert for one token, and that sequence is far off although every weight is right. A wrong weight
        shows in most sequences.
        """
        return self.typical <= tolerance and math.isfinite(self.mean)


def fixed_sequences(
    vocabulary: int, longest: int, seed: int, prompts: Sequence[tuple[int, ...]] = (), count: int = 4
) -> tuple[tuple[int, ...], ...]:
    """Token sequences to compare on: real prompts, and random ones that visit the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    length = max(2, min(longest, 64))
    random = torch.randint(0, vocabulary, (count, length), generator=generator).tolist()
    return (*(prompt for prompt in prompts[:count] if 2 <= len(prompt) <= longest), *map(tuple, random))


def compare(engine: Sequence[Sequence[float]], policy: Sequence[Sequence[float]]) -> CheckReport:
    """Compare logprobs of the same tokens; raises ValueError where the shapes differ."""
    flat_engine = [value for sequence in engine for value in sequence]
    flat_policy = [value for sequence in policy for value in sequence]
    if [len(sequence) for sequence in engine] != [len(sequence) for sequence in policy]:
        raise ValueError("engine and policy scored different numbers of tokens")
    apart = (torch.tensor(flat_engine, dtype=torch.float64) - torch.tensor(flat_policy, dtype=torch.float64)).abs()
    by_sequence = torch.stack([piece.mean() for piece in apart.split([len(sequence) for sequence in engine])])
    # The upper one of two middle values: half of the sequences being wrong is too many.
    typical = by_sequence.sort().values[len(by_sequence) // 2]
    return CheckReport(float(apart.mean()), float(apart.max()), float(typical))
