"""A step's groups -> the micro-batches that this rank trains on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from grpo_mp.algorithms.advantages import group_advantages
from grpo_mp.algorithms.aggregation import token_weights
from grpo_mp.config import Settings
from grpo_mp.data.updates import Update, microbatches, plan_updates
from grpo_mp.planner.grid import replica_ranks
from grpo_mp.policy.parallel import Parallel
from grpo_mp.rollout.exchange import SampleInfo, deliver, share_infos
from grpo_mp.types import MicroBatch, SampleGroup


@dataclass(frozen=True)
class StepBatch:
    """Samples of the whole step in numbers, and this rank's micro-batches of each update."""

    infos: tuple[SampleInfo, ...]
    advantages: tuple[float, ...]
    plan: tuple[Update, ...]
    updates: tuple[tuple[MicroBatch, ...], ...]


def assemble(groups: Sequence[SampleGroup], settings: Settings, parallel: Parallel, hidden_size: int) -> StepBatch:
    """Share the small numbers, plan alike on every rank, and bring each sample to where it is trained on."""
    infos = share_infos(groups, parallel.host)
    wanted = settings.algorithm.advantage
    advantages = group_advantages(
        [info.reward for info in infos], [info.group_id for info in infos], wanted.normalise_std, wanted.eps
    )
    plan = plan_updates(
        [info.total_tokens for info in infos],
        settings.optimizer.updates_per_step,
        settings.layout,
        parallel.data_parallel,
        settings.optimizer.max_tokens_per_microbatch,
        hidden_size,
    )
    samples = deliver(
        groups, _wanted(infos, plan, settings, parallel), parallel.host, parallel.replica, parallel.replica_source
    )
    at = {info.key: i for i, info in enumerate(infos)}
    mine = {at[key]: sample for key, sample in samples.items()}
    updates = tuple(
        tuple(
            microbatches(
                update,
                mine,
                advantages,
                token_weights([infos[i].response_tokens for i in update.samples], settings.algorithm.aggregation),
                settings.layout,
                parallel.here.data,
                parallel.here.context,
            )
        )
        for update in plan
    )
    return StepBatch(tuple(infos), advantages, plan, updates)


def with_reference(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]) -> list[MicroBatch]:
    """The micro-batches with the reference's logprobs; unchanged on stages that computed none."""
    if not outputs:
        return list(update)
    return [replace(batch, reference_logprobs=out[0].cpu()) for batch, out in zip(update, outputs, strict=True)]


def with_old(update: Sequence[MicroBatch], outputs: Sequence[torch.Tensor]) -> list[MicroBatch]:
    """The micro-batches with the logprobs of the policy before the step's first update."""
    if not outputs:
        return list(update)
    return [replace(batch, old_logprobs=out[0].cpu()) for batch, out in zip(update, outputs, strict=True)]


def _wanted(
    infos: Sequence[SampleInfo], plan: Sequence[Update], settings: Settings, parallel: Parallel
) -> dict[int, list[tuple[int, int]]]:
    return {
        replica_ranks(data, settings.layout, parallel.world_size)[0]: [
            infos[i].key for update in plan for i in update.samples_of(data)
        ]
        for data in range(parallel.data_parallel)
    }
