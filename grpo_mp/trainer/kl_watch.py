"""The KL to the reference where it has no weight: measured on a share of the step's micro-batches."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from grpo_mp.policy.policy import Policy
from grpo_mp.types import MicroBatch


def watched(counts: Sequence[int], share: float, block: int, seed: str) -> list[list[int]]:
    """Which micro-batches of each update are measured: at least `share` of all, drawn alike on every rank.

    counts: micro-batches of each update, multiples of `block`, the number that a pipeline schedule takes at a time.
    """
    bounds = (0, *accumulate(count // block for count in counts))
    drawn = random.Random(seed).sample(range(bounds[-1]), math.ceil(share * bounds[-1]))
    return [
        [(one - start) * block + i for one in sorted(drawn) if start <= one < end for i in range(block)]
        for start, end in pairwise(bounds)
    ]


def with_sampled_reference_logprobs(
    updates: Sequence[Sequence[MicroBatch]], policy: Policy, share: float, seed: str
) -> list[list[MicroBatch]]:
    """The step's micro-batches, some with the reference's logprobs. Every rank must call this."""
    layout = policy.parallel.layout
    block = layout.pipeline if layout.virtual_pipeline else 1
    chosen = watched([len(update) for update in updates], share, block, seed)
    with policy.at_reference():
        return [_measured(list(update), places, policy) for update, places in zip(updates, chosen, strict=True)]


def _measured(update: list[MicroBatch], places: Sequence[int], policy: Policy) -> list[MicroBatch]:
    if not places:
        return update
    outputs = policy.logprobs([update[i] for i in places])
    found = dict(zip(places, (output[0].cpu() for output in outputs), strict=False))  # none before the last stage
    return [replace(one, reference_logprobs=found[i]) if i in found else one for i, one in enumerate(update)]
