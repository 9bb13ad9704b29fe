"""What stays fixed over the updates of a step: logprobs of reference and old policy, and what is computed from them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from grpo_mp.algorithms.advantages import outcome_advantages
from grpo_mp.algorithms.kl import ESTIMATORS
from grpo_mp.algorithms.settings import Algorithm, needs_old_logprobs
from grpo_mp.batching.packing import context_index
from grpo_mp.batching.step_batch import StepBatch, with_old_logprobs, with_reference_logprobs
from grpo_mp.batching.updates import Update
from grpo_mp.distributed.process_groups import Parallel, sum_over_context
from grpo_mp.trainer.context import TrainContext
from grpo_mp.trainer.kl_watch import with_sampled_reference_logprobs
from grpo_mp.types import MicroBatch

Updates = list[list[MicroBatch]]


def compute_logprobs(session: TrainContext, batch: StepBatch) -> Updates:
    """The step's micro-batches with everything that its updates need. Every rank must call this."""
    policy, wanted = session.policy, session.settings.algorithm
    kl_in_reward = wanted.kl.place == "reward" and wanted.kl.weight > 0
    updates = [list(update) for update in batch.updates]
    if needs_old_logprobs(wanted, len(updates) * session.settings.optimizer.epochs):
        updates = [_with_old(update, policy.logprobs(update), wanted, session.parallel) for update in updates]
    if wanted.kl.weight:
        with policy.at_reference():  # the weights change places once, not with every update
            updates = [with_reference_logprobs(update, policy.logprobs(update)) for update in updates]
    elif wanted.kl.watch_share:
        seed = f"{session.settings.run.seed}/{session.state.step}"
        updates = with_sampled_reference_logprobs(updates, policy, wanted.kl.watch_share, seed)
    if kl_in_reward:
        updates = _with_kl_in_reward(updates, batch, session)
    return _whitened(updates, session.parallel) if wanted.advantage.whiten else updates


def is_reporting_rank(parallel: Parallel) -> bool:
    """Tensor ranks compute the same tokens, and only the last stage computes any: one of them counts."""
    return parallel.coords.tensor == 0 and parallel.coords.pipeline == parallel.layout.pipeline - 1


def _with_old(
    update: Sequence[MicroBatch], outputs: Sequence[Tensor], wanted: Algorithm, parallel: Parallel
) -> list[MicroBatch]:
    floor, share = _entropy_floor(update, outputs, wanted, parallel)
    return [
        replace(one, entropy_floor=floor, entropy_weight=one.entropy_weight / share)
        for one in with_old_logprobs(update, outputs)
    ]


def _entropy_floor(
    update: Sequence[MicroBatch], outputs: Sequence[Tensor], wanted: Algorithm, parallel: Parallel
) -> tuple[float, float]:
    """The entropy that the wanted share of the update's tokens reaches, and that share (80/20, arXiv 2506.01939)."""
    if wanted.entropy.top_quantile == 1:
        return -np.inf, 1.0
    mine = [out[1].cpu()[one.mask.bool()].numpy() for one, out in zip(update, outputs, strict=False)]
    everyone: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * parallel.world_size
    counts = is_reporting_rank(parallel) and mine
    dist.all_gather_object(everyone, np.concatenate(mine) if counts else everyone[0], group=parallel.cpu_group)
    entropies = np.concatenate(everyone)
    floor = float(np.quantile(entropies, 1 - wanted.entropy.top_quantile))
    return floor, float((entropies >= floor).mean())


def _with_kl_in_reward(updates: Updates, batch: StepBatch, session: TrainContext) -> Updates:
    """Advantages of rewards from which the KL to the reference was taken.

    With a group baseline the whole KL of a response counts against its reward; without one each token bears the KL
    of itself and of the tokens after it (REINFORCE++, arXiv 2501.03262, eq. 7).
    """
    wanted, parallel = session.settings.algorithm, session.parallel
    weight = session.state.controls.get("kl", wanted.kl.weight)

    def cost(one: MicroBatch) -> Tensor:
        return weight * _kl(one, wanted)

    if wanted.advantage.baseline == "none":
        return [[_moved(one, one.advantages - _to_go(cost(one), one, parallel)) for one in part] for part in updates]
    spent = torch.zeros(len(batch.infos), dtype=torch.float64)
    placed = [(one, _samples_of(one, plan)) for part, plan in zip(updates, batch.plan, strict=True) for one in part]
    if is_reporting_rank(parallel):
        for one, place in placed:
            spent.index_add_(0, place, cost(one))
    dist.all_reduce(spent, group=parallel.cpu_group)
    rewards = [info.reward - float(kl) for info, kl in zip(batch.infos, spent, strict=True)]
    ids = [info.group_id for info in batch.infos]
    values = torch.tensor(outcome_advantages(rewards, ids, wanted.advantage), dtype=torch.float64)
    return [
        [_moved(one, values[_samples_of(one, plan)]) for one in part]
        for part, plan in zip(updates, batch.plan, strict=True)
    ]


def _moved(batch: MicroBatch, advantages: Tensor) -> MicroBatch:
    return replace(batch, advantages=advantages * batch.mask)


def _kl(batch: MicroBatch, wanted: Algorithm) -> Tensor:
    """[T] in float64, zero at prompts and padding, where the engine gave no number, and on stages without logprobs."""
    old = batch.rollout_logprobs if wanted.old_logprobs == "engine" else batch.old_logprobs
    if batch.reference_logprobs is None or old is None:
        return torch.zeros_like(batch.advantages)
    log_r = (batch.reference_logprobs - old).double()
    known = batch.mask.bool() & log_r.isfinite()
    return ESTIMATORS[wanted.kl.estimator](log_r, torch.ones_like(log_r)).where(known, 0.0)


def _samples_of(batch: MicroBatch, plan: Update) -> Tensor:
    """[T]: which sample of the step a token belongs to; padding names any."""
    return torch.tensor([plan.samples[i] for i in batch.sample_ids] or [0])[batch.sequence.clamp(min=0)]


def _to_go(values: Tensor, batch: MicroBatch, parallel: Parallel) -> Tensor:
    """[T]: the sum of `values` from a token to the end of its sequence, wherever context parallelism put them."""
    index = context_index(batch.lengths, parallel.layout.context, parallel.coords.context)
    whole = torch.zeros(sum(batch.lengths), dtype=values.dtype).index_copy(0, index, values)
    whole = sum_over_context(whole, parallel)
    pieces = [piece.flip(0).cumsum(0).flip(0) for piece in whole.split(list(batch.lengths))]
    return torch.cat(pieces)[index] * batch.mask


def _whitened(updates: Updates, parallel: Parallel) -> Updates:
    """(A - mean) / (std + 1e-8) over all response tokens of the step (REINFORCE++, eq. 8)."""
    sums = torch.zeros(3, dtype=torch.float64)
    if is_reporting_rank(parallel):
        for one in (one for update in updates for one in update):
            mask, values = one.mask.double(), one.advantages
            sums += torch.stack([mask.sum(), (values * mask).sum(), (values.square() * mask).sum()])
    dist.all_reduce(sums, group=parallel.cpu_group)
    count, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
    std = ((sums[2] / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)).sqrt()
    return [[_moved(one, (one.advantages - mean) / (std + 1e-8)) for one in update] for update in updates]
