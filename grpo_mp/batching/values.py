"""Token-level advantages and returns of a step from the values of a critic."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.algorithms.values import advantages_and_returns
from grpo_mp.batching.packing import context_index
from grpo_mp.batching.step_batch import UpdateBatches, kl_costs
from grpo_mp.distributed.process_groups import Parallel, sum_over_context
from grpo_mp.utils.types import MicroBatch


def with_values(update: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[MicroBatch]:
    """Set the values [T] of each micro-batch. Pipeline stages without `values` leave the micro-batches as they are."""
    if not values:
        return list(update)
    return [replace(batch, values=of_batch.cpu()) for batch, of_batch in zip(update, values, strict=True)]


def with_generalized_advantages(
    updates: UpdateBatches, algorithm: AlgorithmConfig, kl_coef: float, parallel: Parallel
) -> UpdateBatches:
    """Replace each response's advantage by token-level GAE advantages, and set the returns.

    On input the advantage of a response is its reward. The reward arrives at the last generated token; with
    kl.apply_to=reward each token also costs its own KL to the reference. Return = advantage + value. Given tokens, such
    as tool results, are skipped: the step after a generated token is the next generated token. Pipeline stages without
    values leave the micro-batches as they are.
    """
    return [
        [batch if batch.values is None else _with_advantages(batch, algorithm, kl_coef, parallel) for batch in update]
        for update in updates
    ]


def _with_advantages(batch: MicroBatch, algorithm: AlgorithmConfig, kl_coef: float, parallel: Parallel) -> MicroBatch:
    assert batch.values is not None
    costs_kl = algorithm.kl.apply_to == "reward" and algorithm.kl.coef > 0
    costs = kl_costs(batch, algorithm, kl_coef) if costs_kl else torch.zeros_like(batch.advantages)
    own = torch.stack([batch.mask.double(), batch.advantages, costs, batch.values.double()])
    index = context_index(batch.lengths, parallel.layout.context, parallel.coords.context)
    packed = own.new_zeros(len(own), sum(batch.lengths)).index_copy(1, index, own)
    packed = sum_over_context(packed, parallel)
    parts = [_of_sequence(part, algorithm) for part in packed.split(list(batch.lengths), dim=1)]
    advantages, returns = torch.cat(parts, dim=1)[:, index]
    return replace(batch, advantages=advantages, returns=returns)


def _of_sequence(packed: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Return the advantages and returns [2, T] of one sequence, 0 at all tokens that were not generated.

    `packed` [4, T]: mask, the response's reward at each generated token, KL cost, value.
    """
    generated = packed[0].bool()
    result = packed.new_zeros(2, packed.shape[1])
    rewards, costs, values = packed[1:, generated]
    token_rewards = -costs
    token_rewards[-1:] += rewards[-1:]
    result[:, generated] = torch.stack(advantages_and_returns(token_rewards, values, algorithm.gamma, algorithm.lam))
    return result
