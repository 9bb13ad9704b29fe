"""Turn a step's groups into the micro-batches that this rank trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from grpo_mp.algorithms.advantages import AdvantageEstimator, estimate_advantages, load_estimator
from grpo_mp.algorithms.aggregation import token_weights
from grpo_mp.batching.exchange import redistribute
from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import Update, microbatches, plan_updates, sample_order
from grpo_mp.config import Settings
from grpo_mp.distributed.coordinates import model_parallel_ranks
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.types import MicroBatch, PerToken, SampleGroup, SampleInfo


@dataclass(frozen=True)
class StepBatch:
    """Infos of all samples of the step, and this rank's micro-batches of each update."""

    infos: tuple[SampleInfo, ...]
    learns: tuple[bool, ...]
    advantages: tuple[PerToken, ...]  # by sample, before the KL of kl.apply_to=reward and before whitening
    plan: tuple[Update, ...]
    updates: tuple[tuple[MicroBatch, ...], ...]


def assemble_step_batch(
    groups: Sequence[SampleGroup],
    infos: Sequence[SampleInfo],
    reward_weights: Mapping[str, float],
    settings: Settings,
    parallel: Parallel,
    hidden_size: int,
    step: int,
    estimator: AdvantageEstimator | None = None,
) -> StepBatch:
    """Plan the updates, the same on every rank, and send each sample to the rank that trains on it.

    groups: of this rank's engine; infos: of the full step, the same on every rank; step: seeds the shuffle;
    estimator: None takes that of the settings.
    """
    advantage = settings.algorithm.advantage
    advantages = estimate_advantages(estimator or load_estimator(advantage), infos, advantage, reward_weights)
    mask_truncated = settings.algorithm.filter.truncated == "mask"
    learns = tuple(not (mask_truncated and info.truncated) for info in infos)
    prompts = [SamplePrompt(info.group_id, info.prompt_tokens) for info in infos]
    plan = plan_updates(
        [info.total_tokens for info in infos],
        settings.training.updates_per_step,
        settings.layout,
        parallel.data_parallel,
        settings.training.max_tokens_per_microbatch,
        hidden_size,
        sample_order(len(infos), settings.training.shuffle, settings.run.seed, step),
        prompts if settings.training.share_prompts else (),
    )
    keys_by_rank = _keys_by_rank(infos, plan, settings, parallel)
    samples = redistribute(groups, keys_by_rank, parallel.cpu_group, parallel.replica, parallel.replica_source)
    index_of = {info.key: i for i, info in enumerate(infos)}
    local_samples = {index_of[key]: sample for key, sample in samples.items()}
    updates = []
    for update in plan:
        response_tokens = [infos[i].response_tokens for i in update.samples]
        update_learns = [learns[i] for i in update.samples]
        max_response_tokens = settings.rollout.max_response_tokens
        weights = token_weights(response_tokens, update_learns, settings.algorithm, max_response_tokens)
        learning_tokens = sum(tokens for tokens, learn in zip(response_tokens, update_learns, strict=True) if learn)
        batches = microbatches(
            update, local_samples, advantages, weights, settings.layout, parallel.coords.data, parallel.coords.context
        )
        updates.append(tuple(replace(batch, entropy_weight=1.0 / max(1, learning_tokens)) for batch in batches))
    return StepBatch(tuple(infos), learns, tuple(advantages), plan, tuple(updates))


def with_reference_logprobs(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]) -> list[MicroBatch]:
    """Add the reference's logprobs to the micro-batches; leave them on stages that computed none."""
    if not outputs:
        return list(update)
    return [replace(batch, reference_logprobs=out[0].cpu()) for batch, out in zip(update, outputs, strict=True)]


def with_old_logprobs(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]) -> list[MicroBatch]:
    """Add the policy's logprobs before the step's first update; leave them on stages that computed none."""
    if not outputs:
        return list(update)
    return [replace(batch, old_logprobs=out[0].cpu()) for batch, out in zip(update, outputs, strict=True)]


def _keys_by_rank(
    infos: Sequence[SampleInfo], plan: Sequence[Update], settings: Settings, parallel: Parallel
) -> dict[int, list[tuple[int, int]]]:
    return {
        model_parallel_ranks(data, settings.layout, parallel.world_size)[0]: [
            infos[i].key for update in plan for i in update.samples_of(data)
        ]
        for data in range(parallel.data_parallel)
    }
