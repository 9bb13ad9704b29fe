"""The optimal token baseline: token-level advantages of a step from rewards and the old policy's distributions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.algorithms.losses import rollout_is_weights
from grpo_mp.algorithms.policy_losses import Sequences
from grpo_mp.algorithms.settings import RolloutCorrectionConfig
from grpo_mp.batching.step_batch import StepBatch, UpdateBatches, over_sequences
from grpo_mp.batching.updates import UpdatePlan, sequence_of_token
from grpo_mp.distributed.process_groups import Parallel, sum_over_context
from grpo_mp.utils.types import MicroBatch, SampleInfo

EPS = 1e-8  # added to the sum of weights, as in verl


def with_optimal_baselines(
    updates: UpdateBatches, batch: StepBatch, correction: RolloutCorrectionConfig, parallel: Parallel
) -> UpdateBatches:
    """Subtract the optimal baseline of its group from the advantage of each token.

    B_t = sum of A W_t / (sum of W_t + EPS), over the responses of the group that have a token t. A is the response's
    advantage so far, which is its reward by `advantage.scale`. W_t is the sum over j <= t of w_j^2 (1 - 2 p_j + S_j):
    p_j is the old policy's probability of token j, S_j the sum of all its squared probabilities, and w_j the rollout
    correction (optimal token baseline, arXiv 2602.07078; verl's compute_optimal_token_baseline_advantage). As in verl,
    tokens of the longest response behind the end of the second longest have no baseline.
    """
    slots = _Slots.of(batch.infos)
    sums = torch.zeros(2, slots.count, dtype=torch.float64)
    plans = list(zip(updates, batch.plan, strict=True))
    for update, plan in plans:
        for mb in update:
            if mb.squared_probs is not None:
                energies = _energies(mb, correction, parallel)
                if parallel.is_reporting_rank:
                    sums.index_add_(1, slots.of_tokens(mb, plan), torch.stack([mb.advantages * energies, energies]))
    dist.all_reduce(sums, group=parallel.cpu_group)
    baselines = sums[0] / (sums[1] + EPS)
    baselines[slots.without_baseline] = 0.0

    def subtract(mb: MicroBatch, plan: UpdatePlan) -> MicroBatch:
        is_scored = torch.tensor([info.is_scored for info in batch.infos])[sequence_of_token(mb, plan)]
        own = baselines[slots.of_tokens(mb, plan)]
        return replace(mb, advantages=(mb.advantages - own * is_scored) * mb.mask)

    return [[subtract(mb, plan) for mb in update] for update, plan in plans]


@dataclass(frozen=True)
class _Slots:
    """Numbers of the positions in the responses of each group. The last number belongs to all other tokens."""

    starts: Tensor  # int64 [sequences]: number of the first token of the sequence's response
    prompts: Tensor  # int64 [sequences]: tokens of its prompt
    without_baseline: Tensor  # int64: numbers of the positions that only one response has
    count: int

    @staticmethod
    def of(infos: Sequence[SampleInfo]) -> "_Slots":
        """Return numbers of the positions of the responses that have a reward."""
        lengths: dict[int, list[int]] = {}
        for info in infos:
            if info.is_scored:
                lengths.setdefault(info.group_id, []).append(info.response_tokens)
        ends = list(accumulate(map(max, lengths.values()), initial=0))
        start_of = dict(zip(lengths, ends, strict=False))
        alone = [
            torch.arange(start_of[group] + sorted([0, *of_group])[-2], start_of[group] + max(of_group))
            for group, of_group in lengths.items()
        ]
        rest = ends[-1]
        starts = torch.tensor([start_of[info.group_id] if info.is_scored else rest for info in infos])
        prompts = torch.tensor([info.prompt_tokens for info in infos])
        return _Slots(starts, prompts, torch.cat([*alone, torch.tensor([rest])]), rest + 1)

    def of_tokens(self, batch: MicroBatch, plan: UpdatePlan) -> Tensor:
        """Return the number of each target's position, int64 [T]."""
        sequence = sequence_of_token(batch, plan)
        numbers = self.starts[sequence] + batch.positions + 1 - self.prompts[sequence]
        return numbers.where(batch.mask.bool() & (self.starts[sequence] < self.count - 1), self.count - 1)


def _energies(batch: MicroBatch, correction: RolloutCorrectionConfig, parallel: Parallel) -> Tensor:
    """Return W of `with_optimal_baselines` at each token, float64 [T]; 0 at tokens that were not generated."""
    assert batch.old_logprobs is not None
    assert batch.squared_probs is not None
    old = batch.old_logprobs.double().where(batch.mask.bool(), 0.0)
    sequences = Sequences.from_batch(batch, partial(sum_over_context, parallel=parallel))
    rollout = batch.rollout_logprobs.double().where(batch.mask.bool(), 0.0)
    weights = rollout_is_weights(old, rollout, sequences, correction)
    terms = (1 - 2 * old.exp() + batch.squared_probs.double()) * weights.square() * batch.mask
    return over_sequences(terms, batch, parallel, lambda sequence: sequence.cumsum(0)) * batch.mask
