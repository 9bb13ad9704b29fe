"""From a critic's values to the advantages and returns of packed tokens, against loops over samples in float64."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.microbatches import plan_microbatches
from grpo_mp.batching.packing import gather_responses, pack
from grpo_mp.batching.values import with_generalized_advantages, with_values
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.utils.types import MicroBatch, Sample
from tests.algorithms.objective import scatter_responses

GIVEN = ((), (), (True, True, False, False, True, True, True, False, True), (True, True, False))
LENGTHS = (5, 1, 9, 3)
REWARDS = (1.0, -0.5, 2.0, 0.25)


def algorithm(**changes: Any) -> AlgorithmConfig:
    parts = {"advantage": {"baseline": "critic", "scale": "none"}, "aggregation": "token_mean"}
    return AlgorithmConfig.model_validate(parts | changes)


def packed() -> tuple[list[Sample], list[MicroBatch]]:
    samples = [
        Sample(
            *(0, i, (1, 2, 3), tuple(range(length)), (-1.0,) * length, (0,) * length), truncated=False, generated=own
        )
        for i, (length, own) in enumerate(zip(LENGTHS, GIVEN, strict=True))
    ]
    plans = plan_microbatches([sample.total_tokens for sample in samples], 1, 20, align=4).ranks[0]
    return samples, [pack(samples, REWARDS, [1.0] * len(samples), plan, align=4) for plan in plans]


def draw(samples: Sequence[Sample], seed: int) -> list[np.ndarray]:
    """A number for each generated token of each sample."""
    generator = np.random.default_rng(seed)
    return [generator.normal(size=len(s.tokens) - s.given_tokens).astype(np.float32) for s in samples]


def scattered(values: Sequence[np.ndarray], batch: MicroBatch) -> torch.Tensor:
    """What is not generated has numbers, too."""
    own = scatter_responses([torch.from_numpy(values[i]) for i in batch.sample_ids], batch)
    return own.where(batch.mask.bool(), 7.0)


def written_out(reward: float, costs: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> list[float]:
    """From the last token back: A_t = delta_t + gamma lambda A_{t+1}."""
    after = following = 0.0
    found = []
    for t in reversed(range(len(values))):
        own = -float(costs[t]) + (reward if t == len(values) - 1 else 0.0)
        after = own + gamma * following - float(values[t]) + gamma * lam * after
        following = float(values[t])
        found.append(after)
    return found[::-1]


@pytest.mark.parametrize(("apply_to", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_the_reward_comes_with_the_last_token_that_was_generated(
    parallel: Parallel, apply_to: str, estimator: str
) -> None:
    """And a KL in the reward with each, whose coefficient the adaptive one replaces; given tokens are no steps."""
    settings = algorithm(gamma=0.9, lam=0.8, kl={"coef": 5.0, "estimator": estimator, "apply_to": apply_to})
    samples, batches = packed()
    values, old, reference = (draw(samples, seed) for seed in range(3))
    assert len(batches) > 1
    batches = with_values(batches, [scattered(values, batch) for batch in batches])
    batches = [replace(b, old_logprobs=scattered(old, b), reference_logprobs=scattered(reference, b)) for b in batches]
    ((*found,),) = with_generalized_advantages([batches], settings, 0.3, parallel)
    for batch in found:
        assert batch.returns is not None
        assert not batch.advantages[batch.mask == 0].any()
        pairs = zip(gather_responses(batch.advantages, batch), gather_responses(batch.returns, batch), strict=True)
        for i, (advantages, returns) in zip(batch.sample_ids, pairs, strict=True):
            costs = 0.3 * (old[i].astype(np.float64) - reference[i]) if apply_to == "reward" else 0.0 * old[i]
            expected = written_out(REWARDS[i], costs, values[i], 0.9, 0.8)
            assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
            assert returns.tolist() == pytest.approx((np.array(expected) + values[i]).tolist(), abs=1e-6)
