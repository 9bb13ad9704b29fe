"""Compute what stays constant over the updates of a step: old and reference logprobs, and advantages that need them."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.algorithms.advantages import outcome_advantages
from grpo_mp.algorithms.kl import ESTIMATORS
from grpo_mp.algorithms.settings import AlgorithmConfig, needs_old_logprobs
from grpo_mp.batching.packing import context_index
from grpo_mp.batching.step_batch import StepBatch, with_old_logprobs, with_reference_logprobs
from grpo_mp.batching.updates import Update
from grpo_mp.distributed.process_groups import Parallel, all_gather, sum_over_context
from grpo_mp.policy.policy import Policy
from grpo_mp.types import MicroBatch

Updates = list[list[MicroBatch]]


def compute_logprobs(
    policy: Policy, batch: StepBatch, algorithm: AlgorithmConfig, epochs: int, controls: Mapping[str, float], seed: str
) -> Updates:
    """Return the step's micro-batches with everything that its updates need. Every rank must call this.

    controls: adaptive weights by name; seed: draws the micro-batches on which a KL without weight is measured.
    """
    kl, parallel = algorithm.kl, policy.parallel
    updates = [list(update) for update in batch.updates]
    if needs_old_logprobs(algorithm, len(updates) * epochs):
        top_quantile = algorithm.entropy.top_quantile
        updates = [_with_old(update, policy.logprobs(update), top_quantile, parallel) for update in updates]
    if kl.coef:
        with policy.at_reference():  # the weights are swapped once, not for every update
            updates = [with_reference_logprobs(update, policy.logprobs(update)) for update in updates]
    elif kl.monitor_share:
        updates = _with_sampled_reference_logprobs(updates, policy, kl.monitor_share, seed)
    if kl.apply_to == "reward" and kl.coef > 0:
        updates = _with_kl_in_reward(updates, batch, algorithm, controls.get("kl", kl.coef), parallel)
    return _whiten(updates, parallel) if algorithm.advantage.whiten else updates


def is_reporting_rank(parallel: Parallel) -> bool:
    """Tell whether this rank's tokens count: tensor ranks have the same, and only the last stage computes any."""
    return parallel.coords.tensor == 0 and parallel.coords.pipeline == parallel.layout.pipeline - 1


def _with_old(
    update: Sequence[MicroBatch], outputs: Sequence[Tensor], top_quantile: float, parallel: Parallel
) -> list[MicroBatch]:
    """Add old logprobs, and the entropy that `top_quantile` of the update's tokens reach (arXiv 2506.01939)."""
    batches = with_old_logprobs(update, outputs)
    if top_quantile == 1:
        return batches
    local = [out[1].cpu()[batch.mask.bool()].numpy() for batch, out in zip(update, outputs, strict=False)]
    counts = is_reporting_rank(parallel) and local
    own_entropies = np.concatenate(local) if counts else np.empty(0, np.float32)
    entropies = np.concatenate(all_gather(own_entropies, parallel.cpu_group))
    floor = float(np.quantile(entropies, 1 - top_quantile))
    share = float((entropies >= floor).mean())
    return [replace(batch, entropy_floor=floor, entropy_weight=batch.entropy_weight / share) for batch in batches]


def sample_microbatches(counts: Sequence[int], share: float, block: int, seed: str) -> list[list[int]]:
    """Draw at least `share` of the step's micro-batches, alike on every rank; return their indices in each update.

    counts: micro-batches of each update, multiples of `block`, the number that a pipeline schedule takes at a time.
    """
    bounds = (0, *accumulate(count // block for count in counts))
    blocks = sorted(random.Random(seed).sample(range(bounds[-1]), math.ceil(share * bounds[-1])))
    return [
        [(index - start) * block + i for index in blocks if start <= index < end for i in range(block)]
        for start, end in pairwise(bounds)
    ]


def _with_sampled_reference_logprobs(updates: Updates, policy: Policy, share: float, seed: str) -> Updates:
    """Add the reference's logprobs to a share of the micro-batches, to measure a KL that has no weight."""
    layout = policy.parallel.layout
    block = layout.pipeline if layout.virtual_pipeline else 1
    sampled = sample_microbatches([len(update) for update in updates], share, block, seed)
    with policy.at_reference():
        for number, indices in enumerate(sampled):
            batches = [updates[number][i] for i in indices]
            measured = with_reference_logprobs(batches, policy.logprobs(batches)) if batches else []
            by_index = dict(zip(indices, measured, strict=True))
            updates[number] = [by_index.get(i, batch) for i, batch in enumerate(updates[number])]
    return updates


def _with_kl_in_reward(
    updates: Updates, batch: StepBatch, algorithm: AlgorithmConfig, kl_weight: float, parallel: Parallel
) -> Updates:
    """Replace advantages by those of rewards from which the KL to the reference was taken.

    With a group baseline the full KL of a response counts against its reward; without one each token bears the KL
    of itself and of the tokens after it (REINFORCE++, arXiv 2501.03262, eq. 7).
    """

    def cost(microbatch: MicroBatch) -> Tensor:
        return kl_weight * _kl(microbatch, algorithm)

    if algorithm.advantage.baseline == "none":
        return [
            [_with_advantages(mb, mb.advantages - _sum_to_end(cost(mb), mb, parallel)) for mb in update]
            for update in updates
        ]
    plans = list(zip(updates, batch.plan, strict=True))
    kl_by_sample = torch.zeros(len(batch.infos), dtype=torch.float64)
    if is_reporting_rank(parallel):
        for update, plan in plans:
            for mb in update:
                kl_by_sample.index_add_(0, _sample_of_token(mb, plan), cost(mb))
    dist.all_reduce(kl_by_sample, group=parallel.cpu_group)
    rewards = [info.reward - float(kl) for info, kl in zip(batch.infos, kl_by_sample, strict=True)]
    ids = [info.group_id for info in batch.infos]
    advantages = torch.tensor(outcome_advantages(rewards, ids, algorithm.advantage), dtype=torch.float64)
    return [[_with_advantages(mb, advantages[_sample_of_token(mb, plan)]) for mb in update] for update, plan in plans]


def _with_advantages(batch: MicroBatch, advantages: Tensor) -> MicroBatch:
    return replace(batch, advantages=advantages * batch.mask)


def _kl(batch: MicroBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return the KL [T] in float64; zero where a logprob is missing and at prompts and padding."""
    old = batch.rollout_logprobs if algorithm.old_logprobs == "engine" else batch.old_logprobs
    if batch.reference_logprobs is None or old is None:
        return torch.zeros_like(batch.advantages)
    log_r = (batch.reference_logprobs - old).double()
    known = batch.mask.bool() & log_r.isfinite()
    return ESTIMATORS[algorithm.kl.estimator](log_r, torch.ones_like(log_r)).where(known, 0.0)


def _sample_of_token(batch: MicroBatch, plan: Update) -> Tensor:
    """Return [T], the index in the step of each token's sample; arbitrary at padding."""
    return torch.tensor([plan.samples[i] for i in batch.sample_ids] or [0])[batch.sequence.clamp(min=0)]


def _sum_to_end(values: Tensor, batch: MicroBatch, parallel: Parallel) -> Tensor:
    """Return [T], the sum of `values` from each token to the end of its sequence, over all context ranks."""
    index = context_index(batch.lengths, parallel.layout.context, parallel.coords.context)
    packed = torch.zeros(sum(batch.lengths), dtype=values.dtype).index_copy(0, index, values)
    packed = sum_over_context(packed, parallel)
    sums = [sequence.flip(0).cumsum(0).flip(0) for sequence in packed.split(list(batch.lengths))]
    return torch.cat(sums)[index] * batch.mask


def _whiten(updates: Updates, parallel: Parallel) -> Updates:
    """Set advantages to (A - mean) / (std + 1e-8) over all response tokens of the step (REINFORCE++, eq. 8)."""
    sums = torch.zeros(3, dtype=torch.float64)
    if is_reporting_rank(parallel):
        for batch in (batch for update in updates for batch in update):
            mask, values = batch.mask.double(), batch.advantages
            sums += torch.stack([mask.sum(), (values * mask).sum(), (values.square() * mask).sum()])
    dist.all_reduce(sums, group=parallel.cpu_group)
    count, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
    std = ((sums[2] / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)).sqrt()
    return [[_with_advantages(mb, (mb.advantages - mean) / (std + 1e-8)) for mb in update] for update in updates]
