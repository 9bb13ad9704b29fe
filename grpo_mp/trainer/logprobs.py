"""Compute loss inputs that stay constant over a step's updates: logprobs, values, and advantages from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from grpo_mp.algorithms.policy_losses import CovarianceLimits, token_draws
from grpo_mp.algorithms.registries import policy_loss_entry
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.step_batch import (
    StepBatch,
    UpdateBatches,
    whiten,
    with_distillation,
    with_kl_in_reward,
    with_logprobs,
)
from grpo_mp.batching.token_baselines import with_optimal_baselines
from grpo_mp.batching.values import with_generalized_advantages, with_values
from grpo_mp.config.sections import TrainingConfig
from grpo_mp.distributed.process_groups import Parallel, all_gather
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.policy import Policy
from grpo_mp.utils.types import MicroBatch

REFERENCE = "reference_logprobs"


def compute_logprobs(
    policy: Policy,
    batch: StepBatch,
    algorithm: AlgorithmConfig,
    training: TrainingConfig,
    adaptive_coefs: Mapping[str, float],
    critic: Critic | None = None,
) -> UpdateBatches:
    """Return each update's micro-batches with the logprobs, values and advantages that its loss needs.

    `adaptive_coefs`: adaptive loss coefficients by name; `critic`: computes the values for advantage.baseline=critic.
    """
    record_routing = training.router_replay == "R2"  # updates replay the experts of the pass for old logprobs
    kl = algorithm.kl
    parallel = policy.parallel
    updates = [list(update) for update in batch.updates]
    if algorithm.needs_old_logprobs(len(updates) * training.epochs):
        top_quantile = algorithm.entropy.top_quantile
        for number, update in enumerate(updates):
            with policy.use_head(with_squares=algorithm.advantage.of_tokens):
                outputs, batches = (
                    policy.record_routing(update) if record_routing else (policy.logprobs(update), update)
                )
            batches = with_old_logprobs(batches, outputs, top_quantile, parallel)
            if algorithm.advantage.of_tokens and outputs:
                pairs = zip(batches, outputs, strict=True)
                batches = [replace(batch, squared_probs=output[-1].cpu()) for batch, output in pairs]
            updates[number] = batches
    if kl.coef:
        with policy.use_reference_weights():  # swap the weights once, not for every update
            updates = [with_logprobs(update, _reference_logprobs(policy, update), REFERENCE) for update in updates]
    if algorithm.advantage.of_tokens:
        updates = with_optimal_baselines(updates, batch, algorithm.rollout_correction, parallel)
    if batch.teacher:
        outputs = policy.logprobs(batch.teacher.microbatches)
        updates = batch.teacher.with_logprobs(updates, batch.plan, outputs, parallel)
    kl_coef = adaptive_coefs.get("kl", kl.coef)
    if critic:
        updates = [with_values(update, critic.values(update)) for update in updates]
        updates = with_generalized_advantages(updates, algorithm, kl_coef, parallel)
    elif kl.apply_to == "reward" and kl.coef > 0:
        updates = with_kl_in_reward(updates, batch, algorithm=algorithm, kl_coef=kl_coef, parallel=parallel)
    if algorithm.advantage.whiten:
        updates = whiten(updates, parallel)
    if algorithm.distillation:
        updates = with_distillation(updates, algorithm.distillation)
    kind = policy_loss_entry(algorithm.policy_loss).covariance
    return [with_covariances(update, kind, parallel) for update in updates] if kind else updates


def _reference_logprobs(policy: Policy, batches: Sequence[MicroBatch]) -> list[Tensor]:
    return policy.logprobs([replace(batch, routed_experts=None) for batch in batches])


def with_covariances(
    update: Sequence[MicroBatch], kind: Literal["random", "largest"], parallel: Parallel
) -> list[MicroBatch]:
    """Add masks of the tokens that CovarianceLimits selects from all micro-batches of an update."""

    def inputs(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        old = batch.old_logprobs
        return None if old is None else (batch.advantages, old.double().cpu(), token_draws(batch))

    of_batches = [(batch, values) for batch in update if (values := inputs(batch))]
    local = [torch.stack(values)[:, batch.in_loss] for batch, values in of_batches]
    own = torch.cat(local, 1) if parallel.is_reporting_rank and local else torch.empty(3, 0, dtype=torch.float64)
    tokens = torch.cat([torch.from_numpy(part) for part in all_gather(own.numpy(), parallel.cpu_group)], 1)
    if not tokens.shape[1]:  # no sample is in the loss
        return [replace(batch, high_covariance=torch.zeros_like(batch.in_loss)) for batch in update]
    limits = CovarianceLimits.of(kind, advantages=tokens[0], logprobs=tokens[1], draws=tokens[2])
    return [
        replace(batch, high_covariance=limits.select(*of_batch) if (of_batch := inputs(batch)) else None)
        for batch in update
    ]


def with_old_logprobs(
    update: Sequence[MicroBatch], outputs: Sequence[Tensor], top_quantile: float, parallel: Parallel
) -> list[MicroBatch]:
    """Add old logprobs; limit the loss to the share `top_quantile` of tokens with the highest entropy.

    `entropy_floor` is the (1 - top_quantile) quantile of the entropy over the update's loss tokens (arXiv 2506.01939).
    `entropy_weight` is divided by the remaining share of tokens, so that the entropy bonus stays a mean.
    """
    batches = with_logprobs(update, outputs, "old_logprobs")
    if top_quantile == 1:
        return batches
    local = [out[1].cpu()[batch.in_loss].numpy() for batch, out in zip(update, outputs, strict=False)]
    counts = parallel.is_reporting_rank and local
    own_entropies = np.concatenate(local) if counts else np.empty(0, np.float32)
    entropies = np.concatenate(all_gather(own_entropies, parallel.cpu_group))
    if not entropies.size:  # no sample is in the loss
        return batches
    floor = float(np.quantile(entropies, 1 - top_quantile))
    share = float((entropies >= floor).mean())
    return [replace(batch, entropy_floor=floor, entropy_weight=batch.entropy_weight / share) for batch in batches]
