"""A step's groups -> the micro-batches that this rank trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from grpo_mp.algorithms.advantages import decoupled_advantages, outcome_advantages, process_advantages
from grpo_mp.algorithms.aggregation import token_weights
from grpo_mp.batching.exchange import redistribute
from grpo_mp.batching.shared_prompts import PromptOf
from grpo_mp.batching.updates import Update, microbatches, plan_updates, sample_order
from grpo_mp.config import Settings
from grpo_mp.distributed.coordinates import model_parallel_ranks
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.types import MicroBatch, PerToken, SampleGroup, SampleInfo


@dataclass(frozen=True)
class StepBatch:
    """Samples of the whole step in numbers, and this rank's micro-batches of each update."""

    infos: tuple[SampleInfo, ...]
    learns: tuple[bool, ...]
    advantages: tuple[PerToken, ...]  # by sample, before the KL of kl.place=reward and before whitening
    plan: tuple[Update, ...]
    updates: tuple[tuple[MicroBatch, ...], ...]


def assemble(
    groups: Sequence[SampleGroup],
    infos: Sequence[SampleInfo],
    reward_weights: Mapping[str, float],
    settings: Settings,
    parallel: Parallel,
    hidden_size: int,
    step: int,
) -> StepBatch:
    """Plan alike on every rank, and bring each sample to where it is trained on.

    groups: of this rank's engine; infos: of the whole step, the same on every rank; step: decides a random order.
    """
    advantages = sample_advantages(infos, reward_weights, settings)
    masks = settings.algorithm.filter.truncated == "mask"
    learns = tuple(not (masks and info.truncated) for info in infos)
    plan = plan_updates(
        [info.total_tokens for info in infos],
        settings.optimizer.updates_per_step,
        settings.layout,
        parallel.data_parallel,
        settings.optimizer.max_tokens_per_microbatch,
        hidden_size,
        sample_order(len(infos), settings.optimizer.shuffle, settings.run.seed, step),
        prompts_of(infos) if settings.optimizer.share_prompts else (),
    )
    samples = redistribute(
        groups, _wanted(infos, plan, settings, parallel), parallel.cpu_group, parallel.replica, parallel.replica_source
    )
    at = {info.key: i for i, info in enumerate(infos)}
    mine = {at[key]: sample for key, sample in samples.items()}
    coords = parallel.coords
    updates = tuple(
        tuple(
            replace(batch, entropy_weight=1.0 / max(1, _learning_tokens(update, infos, learns)))
            for batch in microbatches(
                update,
                mine,
                advantages,
                _weights(update, infos, learns, settings),
                settings.layout,
                coords.data,
                coords.context,
            )
        )
        for update in plan
    )
    return StepBatch(tuple(infos), learns, tuple(advantages), plan, updates)


def prompts_of(infos: Sequence[SampleInfo]) -> list[PromptOf]:
    """The samples of a group have one prompt."""
    return [PromptOf(info.group_id, info.total_tokens - info.response_tokens) for info in infos]


def sample_advantages(infos: Sequence[SampleInfo], weights: Mapping[str, float], settings: Settings) -> list[PerToken]:
    """The advantage of each sample, as the settings say from its reward, the reward's parts or its steps."""
    wanted, ids = settings.algorithm.advantage, [info.group_id for info in infos]
    if wanted.level == "process":
        lengths = [info.response_tokens for info in infos]
        return list(process_advantages([info.step_rewards for info in infos], lengths, ids, wanted))
    if wanted.combine == "normalise":
        return list(decoupled_advantages([info.reward_parts for info in infos], weights, ids, wanted))
    return list(outcome_advantages([info.reward for info in infos], ids, wanted))


def _weights(update: Update, infos: Sequence[SampleInfo], learns: Sequence[bool], settings: Settings) -> list[PerToken]:
    return token_weights(
        [infos[i].response_tokens for i in update.samples],
        [learns[i] for i in update.samples],
        settings.algorithm,
        settings.rollout.max_response_tokens,
    )


def _learning_tokens(update: Update, infos: Sequence[SampleInfo], learns: Sequence[bool]) -> int:
    return sum(infos[i].response_tokens for i in update.samples if learns[i])


def with_reference_logprobs(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]) -> list[MicroBatch]:
    """The micro-batches with the reference's logprobs; unchanged on stages that computed none."""
    if not outputs:
        return list(update)
    return [replace(batch, reference_logprobs=out[0].cpu()) for batch, out in zip(update, outputs, strict=True)]


def with_old_logprobs(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]) -> list[MicroBatch]:
    """The micro-batches with the logprobs of the policy before the step's first update."""
    if not outputs:
        return list(update)
    return [replace(batch, old_logprobs=out[0].cpu()) for batch, out in zip(update, outputs, strict=True)]


def _wanted(
    infos: Sequence[SampleInfo], plan: Sequence[Update], settings: Settings, parallel: Parallel
) -> dict[int, list[tuple[int, int]]]:
    return {
        model_parallel_ranks(data, settings.layout, parallel.world_size)[0]: [
            infos[i].key for update in plan for i in update.samples_of(data)
        ]
        for data in range(parallel.data_parallel)
    }
