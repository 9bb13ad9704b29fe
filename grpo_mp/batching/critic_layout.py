"""Values, returns and their tokens between the micro-batches of a policy and those of a critic in another layout.

Both have the same samples in the same updates. A number of each response token of the step goes over all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.batching.step_batch import StepBatch, UpdateBatches, sequence_of_token
from grpo_mp.batching.updates import UpdatePlan
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.utils.types import MicroBatch, SampleInfo


@dataclass(frozen=True)
class _TokenOffsets:
    """Where each response token of a step is in one row of all, sequence after sequence."""

    starts: Tensor  # int64 [sequences]: place of position 0 of each, before that of its first response token
    total: int

    @classmethod
    def of(cls, infos: Sequence[SampleInfo]) -> "_TokenOffsets":
        ends = list(accumulate(info.response_tokens for info in infos))
        # The position before a response token predicts it.
        starts = [end - info.response_tokens - (info.prompt_tokens - 1) for end, info in zip(ends, infos, strict=True)]
        return cls(torch.tensor(starts), ends[-1] if ends else 0)

    def of_generated(self, batch: MicroBatch, plan: UpdatePlan) -> Tensor:
        """Return the places of a micro-batch's generated tokens, in its order."""
        places = self.starts[sequence_of_token(batch, plan)] + batch.positions
        return places[batch.mask.bool()]


def values_on_policy(
    batch: StepBatch,
    updates: UpdateBatches,
    values: Sequence[Sequence[Tensor]],
    critic: Parallel,
    policy: Parallel,
) -> UpdateBatches:
    """Return the policy's micro-batches with the values that the critic's layout computed, on its last stage.

    `values` [T]: of each micro-batch of `batch.critic`; without any on stages that computed none. Every rank must call
    this.
    """
    assert batch.critic
    batches = [
        [replace(one, values=value.cpu()) for one, value in zip(update, of_update, strict=True)] if of_update else []
        for update, of_update in zip(batch.critic.updates, values, strict=True)
    ]
    places = _TokenOffsets.of(batch.infos)
    row = _on_every_rank(batches, batch.critic.plan, places, lambda one: one.values, critic)
    if not _is_last_stage(policy):
        return updates
    return [
        [replace(one, values=_take(row, one, plan, places).float()) for one in update]
        for update, plan in zip(updates, batch.plan, strict=True)
    ]


def critic_updates(batch: StepBatch, updates: UpdateBatches, critic: Parallel, policy: Parallel) -> UpdateBatches:
    """Return the micro-batches on which the critic trains: with values and returns of the policy's, `updates`.

    They are those, where both have one layout. Every rank must call this.
    """
    if batch.critic is None:
        return updates
    places = _TokenOffsets.of(batch.infos)
    values = _on_every_rank(updates, batch.plan, places, lambda one: one.values, policy)
    returns = _on_every_rank(updates, batch.plan, places, lambda one: one.returns, policy)
    if not _is_last_stage(critic):
        return [list(update) for update in batch.critic.updates]
    return [
        [
            replace(one, values=_take(values, one, plan, places).float(), returns=_take(returns, one, plan, places))
            for one in update
        ]
        for update, plan in zip(batch.critic.updates, batch.critic.plan, strict=True)
    ]


def _is_last_stage(parallel: Parallel) -> bool:
    return parallel.coords.pipeline == parallel.layout.pipeline - 1


def _on_every_rank(
    updates: Sequence[Sequence[MicroBatch]],
    plans: Sequence[UpdatePlan],
    places: _TokenOffsets,
    number_of: Callable[[MicroBatch], Tensor | None],
    parallel: Parallel,
) -> Tensor:
    """Return a number of each generated token, float64 [response tokens of the step], as the reporting ranks have it.

    Others are zero. Every rank must call this.
    """
    row = torch.zeros(places.total, dtype=torch.float64)
    if parallel.is_reporting_rank:
        for update, plan in zip(updates, plans, strict=True):
            for one in update:
                numbers = number_of(one)
                assert numbers is not None  # the last stage has them
                row[places.of_generated(one, plan)] = numbers[one.mask.bool()].double()
    dist.all_reduce(row, group=parallel.cpu_group)
    return row


def _take(row: Tensor, batch: MicroBatch, plan: UpdatePlan, places: _TokenOffsets) -> Tensor:
    """Return the numbers of a micro-batch's tokens, float64 [T], 0 but at generated ones."""
    numbers = torch.zeros(batch.total_tokens, dtype=torch.float64)
    numbers[batch.mask.bool()] = row[places.of_generated(batch, plan)]
    return numbers
