"""Turn a step's groups into the micro-batches that this rank trains on, and complete them by logprobs and their KL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp.algorithms.advantages import AdvantageEstimator, estimate_advantages, outcome_advantages
from grpo_mp.algorithms.losses import estimate_kl, token_weights
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.exchange import redistribute
from grpo_mp.batching.packing import context_index
from grpo_mp.batching.routed_experts import exchange_routed_experts
from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import UpdatePlan, microbatches, plan_updates, sample_order
from grpo_mp.config import Settings
from grpo_mp.distributed.coordinates import model_parallel_ranks
from grpo_mp.distributed.process_groups import Parallel, sum_over_context
from grpo_mp.types import MicroBatch, PerToken, SampleGroup, SampleInfo

UpdateBatches = list[list[MicroBatch]]


@dataclass(frozen=True)
class StepBatch:
    """Infos of all samples of the step, and this rank's micro-batches of each update."""

    infos: tuple[SampleInfo, ...]
    in_loss: tuple[bool, ...]
    advantages: tuple[PerToken, ...]  # by sample, before the KL of kl.apply_to=reward and before whitening
    plan: tuple[UpdatePlan, ...]
    updates: tuple[tuple[MicroBatch, ...], ...]
    unrouted_samples: int | None = None  # without the experts that routing replay R3 replays; None: no such replay


def assemble_step_batch(
    groups: list[SampleGroup],
    infos: Sequence[SampleInfo],
    reward_weights: Mapping[str, float],
    settings: Settings,
    parallel: Parallel,
    hidden_size: int,
    step: int,
    estimator: AdvantageEstimator,
    moe_layers: Sequence[int] = (),
) -> StepBatch:
    """Plan the updates, the same on every rank, and send each sample to the rank that trains on it.

    groups: of this rank's engine; infos: of the full step, the same on every rank; step: seeds the shuffle;
    moe_layers: of this rank, for routing replay R3, which takes the experts out of `groups`.
    """
    advantages = estimate_advantages(estimator, infos, settings.algorithm.advantage, reward_weights)
    unlearned = {"error", "timeout"} if settings.rollout.failed == "mask" else set[str]()
    mask_truncated = settings.algorithm.filter.truncated == "mask"
    in_loss = tuple(not ((mask_truncated and info.truncated) or info.state in unlearned) for info in infos)
    prompts = [SamplePrompt(info.key if info.has_own_prompt else info.group_id, info.prompt_tokens) for info in infos]
    plan = plan_updates(
        [info.total_tokens for info in infos],
        settings.training.updates_per_step,
        settings.layout,
        parallel.dp_size,
        settings.training.max_tokens_per_microbatch,
        hidden_size,
        sample_order(len(infos), settings.training.shuffle, settings.run.seed, step),
        prompts if settings.training.share_prompts else (),
    )
    keys_by_rank = {
        model_parallel_ranks(data, parallel.layout, parallel.world_size)[0]: [
            infos[i].key for update in plan for i in update.samples_of(data)
        ]
        for data in range(parallel.dp_size)
    }
    samples = redistribute(groups, keys_by_rank, parallel.cpu_group, parallel.replica, parallel.replica_source)
    index_of = {info.key: i for i, info in enumerate(infos)}
    local_samples = {index_of[key]: sample for key, sample in samples.items()}
    updates = []
    for update in plan:
        generated_tokens = [infos[i].generated_tokens for i in update.samples]
        update_in_loss = [in_loss[i] for i in update.samples]
        max_response_tokens = settings.rollout.max_response_tokens
        weights = token_weights(generated_tokens, update_in_loss, settings.algorithm, max_response_tokens)
        loss_tokens = sum(tokens for tokens, included in zip(generated_tokens, update_in_loss, strict=True) if included)
        batches = microbatches(
            update, local_samples, advantages, weights, settings.layout, parallel.coords.data, parallel.coords.context
        )
        updates.append(tuple(replace(batch, entropy_weight=1.0 / max(1, loss_tokens)) for batch in batches))
    unrouted_samples = None
    if settings.training.router_replay == "R3":
        unrouted_samples = sum(not info.has_routed_experts for info in infos)
        routed = exchange_routed_experts(groups, infos, plan, moe_layers, parallel)
        updates = [
            tuple(replace(batch, routed_experts=experts) for batch, experts in zip(*pair, strict=True))
            for pair in zip(updates, routed, strict=True)
        ]
    return StepBatch(tuple(infos), in_loss, tuple(advantages), plan, tuple(updates), unrouted_samples)


def with_logprobs(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor], field: str) -> list[MicroBatch]:
    """Set `field` of the micro-batches to the logprobs in `outputs`; leave it on stages that computed none."""
    if not outputs:
        return list(update)
    values: list[dict[str, Any]] = [{field: output[0].cpu()} for output in outputs]
    return [replace(batch, **value) for batch, value in zip(update, values, strict=True)]


def with_kl_in_reward(
    updates: UpdateBatches, batch: StepBatch, algorithm: AlgorithmConfig, kl_coef: float, parallel: Parallel
) -> UpdateBatches:
    """Replace advantages by those of rewards from which the KL to the reference was taken.

    With a group baseline the whole KL of a response counts against its reward; without one each token bears the KL
    of itself and of the tokens after it (REINFORCE++, arXiv 2501.03262, eq. 7).
    """

    def cost(mb: MicroBatch) -> torch.Tensor:
        """Return the weighted KL [T] in float64; zero where a logprob is missing and at prompts and padding."""
        old = mb.rollout_logprobs if algorithm.old_logprobs == "engine" else mb.old_logprobs
        if mb.reference_logprobs is None or old is None:
            return torch.zeros_like(mb.advantages)
        log_r = (mb.reference_logprobs - old).double()
        known = mb.mask.bool() & log_r.isfinite()
        return kl_coef * estimate_kl(algorithm.kl, log_r, torch.ones_like(log_r)).where(known, 0.0)

    if algorithm.advantage.baseline == "none":
        return [
            [_with_advantages(mb, mb.advantages - _sum_to_end(cost(mb), mb, parallel)) for mb in update]
            for update in updates
        ]
    plans = list(zip(updates, batch.plan, strict=True))
    kl_by_sample = torch.zeros(len(batch.infos), dtype=torch.float64)
    if parallel.is_reporting_rank:
        for update, plan in plans:
            for mb in update:
                kl_by_sample.index_add_(0, _sample_of_token(mb, plan), cost(mb))
    dist.all_reduce(kl_by_sample, group=parallel.cpu_group)
    rewards = [info.reward - float(kl) for info, kl in zip(batch.infos, kl_by_sample, strict=True)]
    ids = [info.group_id for info in batch.infos]
    advantages = torch.tensor(outcome_advantages(rewards, ids, algorithm.advantage), dtype=torch.float64)
    return [[_with_advantages(mb, advantages[_sample_of_token(mb, plan)]) for mb in update] for update, plan in plans]


def _with_advantages(batch: MicroBatch, advantages: torch.Tensor) -> MicroBatch:
    return replace(batch, advantages=advantages * batch.mask)


def _sample_of_token(batch: MicroBatch, plan: UpdatePlan) -> torch.Tensor:
    """Return [T], the index in the step of each token's sample; arbitrary at padding."""
    return torch.tensor([plan.samples[i] for i in batch.sample_ids] or [0])[batch.sequence_index.clamp(min=0)]


def _sum_to_end(values: torch.Tensor, batch: MicroBatch, parallel: Parallel) -> torch.Tensor:
    """Return [T], the sum of `values` from each token to the end of its sequence, over all context ranks."""
    index = context_index(batch.lengths, parallel.layout.context, parallel.coords.context)
    packed = torch.zeros(sum(batch.lengths), dtype=values.dtype).index_copy(0, index, values)
    packed = sum_over_context(packed, parallel)
    sums = [sequence.flip(0).cumsum(0).flip(0) for sequence in packed.split(list(batch.lengths))]
    return torch.cat(sums)[index] * batch.mask


def whiten(updates: UpdateBatches, parallel: Parallel) -> UpdateBatches:
    """Set advantages to (A - mean) / (std + 1e-8) over all response tokens of the step (REINFORCE++, eq. 8)."""
    sums = torch.zeros(3, dtype=torch.float64)
    if parallel.is_reporting_rank:
        for batch in (batch for update in updates for batch in update):
            mask, values = batch.mask.double(), batch.advantages
            sums += torch.stack([mask.sum(), (values * mask).sum(), (values.square() * mask).sum()])
    dist.all_reduce(sums, group=parallel.cpu_group)
    count, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
    std = ((sums[2] / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)).sqrt()
    return [[_with_advantages(mb, (mb.advantages - mean) / (std + 1e-8)) for mb in update] for update in updates]
