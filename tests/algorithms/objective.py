"""The GRPO objective of one update, written out sample by sample in float64; and the same as micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_mp.algorithms.advantages import group_advantages
from grpo_mp.algorithms.aggregation import token_weights
from grpo_mp.config import Algorithm
from grpo_mp.data.pack import pack, scatter_responses
from grpo_mp.data.schedule import plan_microbatches
from grpo_mp.types import MicroBatch, Sample

Values = NDArray[np.float32]
PROMPT_TOKENS = 3


@dataclass(frozen=True)
class Drawn:
    """An update: of each sample its group and reward, and of each of its response tokens four logprobs."""

    groups: Sequence[int]
    rewards: Sequence[float]
    logprobs: Sequence[Values]
    rollout: Sequence[Values]
    old: Sequence[Values] | None
    reference: Sequence[Values] | None

    @property
    def lengths(self) -> list[int]:
        return [len(values) for values in self.logprobs]


def draw(lengths: Sequence[int], groups: Sequence[int], seed: int, apart: float, first: bool, kl: bool) -> Drawn:
    """`apart`: standard deviation of the log-ratios to the old policy and to the reference."""
    generator = np.random.default_rng(seed)

    def near(centre: Sequence[Values], by: float) -> list[Values]:
        return [(values - by * generator.standard_normal(values.shape)).astype(np.float32) for values in centre]

    logprobs = [-generator.exponential(2.0, n).astype(np.float32) for n in lengths]
    return Drawn(
        groups=groups,
        rewards=generator.choice([0.0, 0.5, 1.5], len(lengths)).tolist(),
        logprobs=logprobs,
        rollout=near(logprobs, 0.01),
        old=None if first else near(logprobs, apart),
        reference=near(logprobs, apart) if kl else None,
    )


@dataclass(frozen=True)
class Written:
    """Loss and its gradients by sample. Scales are sums of the terms' sizes: rounding is measured against them."""

    loss: float
    scale: float
    gradients: list[NDArray[np.float64]]
    gradient_scales: list[NDArray[np.float64]]


def write_out(drawn: Drawn, algorithm: Algorithm) -> Written:
    """DeepSeekMath, eq. 3 with the estimator of eq. 4, negated; the gradient as eq. 21 gives it, clipping added."""
    loss = scale = 0.0
    gradients, gradient_scales = [], []
    low, high, beta = 1 - algorithm.clip.low, 1 + algorithm.clip.high, algorithm.kl.weight
    for i, logprobs in enumerate(np.asarray(values, np.float64) for values in drawn.logprobs):
        advantage = _advantage(drawn, i, algorithm)
        ratio = np.ones_like(logprobs) if drawn.old is None else np.exp(logprobs - drawn.old[i].astype(np.float64))
        gain = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
        moves = ratio <= high if advantage > 0 else ratio >= low
        to_reference = np.zeros_like(logprobs)
        if drawn.reference is not None:
            to_reference = drawn.reference[i].astype(np.float64) - logprobs
        kl = np.exp(to_reference) - to_reference - 1
        tokens = sum(drawn.lengths) if algorithm.aggregation == "token_mean" else len(drawn.lengths) * len(logprobs)
        loss -= float((gain - beta * kl).sum()) / tokens
        scale += float((np.abs(gain) + beta * kl).sum()) / tokens
        slope, pull = moves * ratio * advantage / tokens, beta * (np.exp(to_reference) - 1) / tokens
        gradients.append(-slope - pull)
        gradient_scales.append(np.abs(slope) + np.abs(pull))
    return Written(loss, scale, gradients, gradient_scales)


def _advantage(drawn: Drawn, sample: int, algorithm: Algorithm) -> float:
    pairs = zip(drawn.rewards, drawn.groups, strict=True)
    group = np.array([reward for reward, group in pairs if group == drawn.groups[sample]])
    spread = group.std(ddof=1) + algorithm.advantage.eps if len(group) > 1 else 1.0
    return float((drawn.rewards[sample] - group.mean()) / spread)


def as_microbatches(drawn: Drawn, algorithm: Algorithm, max_tokens: int) -> tuple[list[MicroBatch], list[torch.Tensor]]:
    """Packed micro-batches of at most `max_tokens`, and the present logprobs [T] of each."""
    samples = [_sample(values) for values in drawn.rollout]
    wanted = algorithm.advantage
    advantages = group_advantages(drawn.rewards, drawn.groups, wanted.normalise_std, wanted.eps)
    weights = token_weights(drawn.lengths, algorithm.aggregation)
    plans = plan_microbatches([sample.total_tokens for sample in samples], 1, max_tokens, align=4).ranks[0]
    batches = [pack(samples, advantages, weights, plan, align=4) for plan in plans]
    filled = [
        replace(
            batch, old_logprobs=_placed(drawn.old, batch, 0.0), reference_logprobs=_placed(drawn.reference, batch, 0.0)
        )
        for batch in batches
    ]
    present = [_placed(drawn.logprobs, batch, -1.0) for batch in batches]
    return filled, [values for values in present if values is not None]


def _placed(values: Sequence[Values] | None, batch: MicroBatch, elsewhere: float) -> torch.Tensor | None:
    if values is None:
        return None
    placed = scatter_responses([torch.from_numpy(values[i]) for i in batch.sample_ids], batch)
    return placed.where(batch.mask.bool(), elsewhere)


def _sample(rollout: Values) -> Sample:
    tokens = tuple(range(len(rollout)))
    return Sample(0, 0, (1,) * PROMPT_TOKENS, tokens, tuple(rollout.tolist()), (0,) * len(tokens), truncated=False)
