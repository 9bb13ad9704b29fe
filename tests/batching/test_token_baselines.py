"""The optimal token baseline beside its formula, sample by sample, as verl 0.9 computes it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.settings import AlgorithmConfig, RolloutCorrectionConfig
from grpo_mp.batching.packing import gather_responses
from grpo_mp.batching.step_batch import StepBatch
from grpo_mp.batching.token_baselines import with_optimal_baselines
from grpo_mp.batching.updates import PackingRule, plan_updates
from grpo_mp.distributed.process_groups import Parallel
from tests.algorithms.objective import draw_update, sample_infos, to_microbatches

LENGTHS = (9, 30, 17, 30, 3, 24, 5)
GROUPS = (0, 0, 0, 1, 1, 1, 2)
REWARDS = (1.0, 0.25, -0.5, 2.0, 0.5, 7.0, 0.0)  # that of sample 5 is unknown, sample 6 is alone
UNSCORED = 5


def expected(old: np.ndarray, squares: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """verl's compute_optimal_token_baseline_advantage with handle_zero_tail, [samples, tokens]."""
    energies = np.cumsum((1 - 2 * np.exp(old) + squares) * weights**2 * mask, axis=1)
    returns = np.array(REWARDS)[:, None] * mask
    baselines = np.zeros_like(returns)
    for group in set(GROUPS):
        members = [i for i, number in enumerate(GROUPS) if number == group and i != UNSCORED]
        if len(members) == 1:
            continue
        w = energies[members] * mask[members]
        baselines[members] = (returns[members] * w).sum(0) / (w.sum(0) + 1e-8)
        second, first = sorted(LENGTHS[i] for i in members)[-2:]
        longest = [i for i in members if LENGTHS[i] == first]
        if len(longest) == 1:
            baselines[longest[0], second:] = 0
    return (returns - baselines) * mask


@pytest.mark.parametrize("max_tokens", [40, 10_000])
@pytest.mark.parametrize("truncates", [False, True])
def test_optimal_baselines_beside_the_formula(parallel: Parallel, max_tokens: int, truncates: bool) -> None:
    update = draw_update(LENGTHS, GROUPS, seed=3, rollout_std=0.5)
    batches, _ = to_microbatches(update, AlgorithmConfig(), max_tokens, REWARDS)
    generator = torch.Generator().manual_seed(0)
    batches = [replace(mb, squared_probs=torch.rand(mb.mask.shape, generator=generator)) for mb in batches]
    infos = sample_infos(GROUPS, rewards=REWARDS, lengths=LENGTHS)
    infos[UNSCORED] = replace(infos[UNSCORED], is_scored=False)
    (plan,) = plan_updates(LENGTHS, 1, PackingRule(parallel.layout, 1, max_tokens, 64))
    assert plan.samples == tuple(range(7))
    step = StepBatch(tuple(infos), (True,) * 7, REWARDS, (plan,), (tuple(batches),))
    settings = {"kind": "truncate", "high": 1.2} if truncates else {}
    correction = RolloutCorrectionConfig.model_validate(settings)
    (found,) = with_optimal_baselines([batches], step, correction, parallel)

    table = np.zeros((3, len(LENGTHS), max(LENGTHS)))
    actual, mask, squares = table
    for mb in found:
        rows = zip(mb.sample_ids, gather_responses(torch.stack([mb.advantages, mb.squared_probs]).t(), mb), strict=True)
        for i, row in rows:
            actual[i, : LENGTHS[i]] = row[:, 0]
            squares[i, : LENGTHS[i]] = row[:, 1]
            mask[i, : LENGTHS[i]] = 1
    old = np.array([np.pad(row, (0, max(LENGTHS) - len(row))) for row in update.old]).astype(np.float64)
    rollout = np.array([np.pad(row, (0, max(LENGTHS) - len(row))) for row in update.rollout]).astype(np.float64)
    weights = np.minimum(np.exp(old - rollout), 1.2) if truncates else np.ones_like(old)
    by_formula = expected(old, squares, weights, mask)
    by_formula[UNSCORED] = REWARDS[UNSCORED]  # it has no baseline, and no loss
    assert np.abs(actual - by_formula * mask).max() < 1e-12
