"""Samples that are left out of the loss: which are, and that nothing else counts them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from grpo_mp.algorithms import policy_losses
from grpo_mp.algorithms.losses import off_policy_mask
from grpo_mp.algorithms.policy_losses import Sequences
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.algorithms.values import LOSS_SUMS, RETURN_SUMS, make_value_loss, return_sums
from grpo_mp.batching.microbatches import plan_microbatches
from grpo_mp.batching.packing import gather_responses, pack
from grpo_mp.batching.step_batch import is_masked, whiten
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.trainer.logprobs import with_covariances, with_old_logprobs
from grpo_mp.utils.types import MicroBatch, Sample, SampleInfo
from tests.algorithms.objective import draw_update, loss_of, to_microbatches
from tests.minimal_settings import MINIMAL_SETTINGS

# The last is left out
LENGTHS = (4, 3, 20)
ADVANTAGES = (1.0, -1.0, 50.0)
WEIGHTS = (0.25, 0.25, 0.0)
TRAINED = torch.tensor([1.0] * 4 + [-1.0] * 3, dtype=torch.float64)


def packed(*advantages: Any, weights: Sequence[float] = WEIGHTS) -> MicroBatch:
    samples = [
        Sample(0, i, (1, 2), tuple(range(length)), (-1.0,) * length, (0,) * length, truncated=False)
        for i, length in enumerate(LENGTHS)
    ]
    (plan,) = plan_microbatches([sample.total_tokens for sample in samples], 1, 64, align=4).ranks[0]
    return pack(samples, advantages or ADVANTAGES, weights, plan, align=4)


def settings(**algorithm: Any) -> Settings:
    return Settings.model_validate(MINIMAL_SETTINGS | {"algorithm": algorithm})


def test_whitening_is_over_the_tokens_that_train(parallel: Parallel) -> None:
    batch = packed()
    ((whitened,),) = whiten([[batch]], parallel)
    expected = (TRAINED - TRAINED.mean()) / (TRAINED.std() + 1e-8)
    torch.testing.assert_close(whitened.advantages[batch.in_loss].sort().values, expected.sort().values)


def test_the_entropy_bonus_is_a_mean_over_the_tokens_that_train() -> None:
    algorithm = AlgorithmConfig.model_validate({"entropy": {"coef": 0.5}})
    batch = replace(packed(), entropy_weight=1 / 7)
    logprobs = batch.rollout_logprobs.clone()
    entropy = torch.where(batch.in_loss, 2.0, 9.0)
    losses = [loss_of(algorithm)(logprobs, entropy * scale, batch)[0] for scale in (0, 1)]
    assert float(losses[1] - losses[0]) == pytest.approx(-0.5 * 2.0)


def test_a_critics_numbers_are_of_the_tokens_that_train() -> None:
    batch = packed()
    values = torch.where(batch.in_loss, 1.0, 5.0)
    batch = replace(batch, values=values, returns=torch.where(batch.in_loss, 1.0, 100.0).double())
    sums = dict(zip(RETURN_SUMS, return_sums([batch]).tolist(), strict=True))
    assert (sums["tokens"], sums["returns"], sums["errors2"]) == (7, 7, 0)
    _, loss_sums = make_value_loss(0.2)(values + 3.0, batch)
    found = dict(zip(LOSS_SUMS, loss_sums.tolist(), strict=True))
    assert (found["tokens"], found["vf_clipped"]) == (7, 0)


@pytest.mark.parametrize(
    ("algorithm", "info", "masked"),
    [
        ({}, {"truncated": True}, False),
        ({"filter": {"truncated": "mask"}}, {"truncated": True}, True),
        ({}, {"state": "error"}, True),
        ({}, {"is_scored": False}, False),  # its advantage is 0
        ({"advantage": {"scale": "none", "whiten": True}}, {"is_scored": False}, True),  # whitening would move it
        ({"advantage": {"baseline": "none", "scale": "none"}}, {"is_scored": False}, True),
        ({"distillation": {"teacher": {"path": "teacher"}}}, {"is_scored": False}, False),
    ],
)
def test_which_samples_are_left_out(algorithm: dict[str, Any], info: dict[str, Any], masked: bool) -> None:
    values: dict[str, Any] = {"truncated": False} | info
    sample = SampleInfo(0, 0, 3, 4, 0.5, values.pop("truncated"), 0, **values)
    assert is_masked(sample, settings(**algorithm).algorithm, True) is masked


def test_a_response_that_drifted_is_left_out_as_a_whole() -> None:
    """By the mean of its tokens' advantages, which a critic or a teacher gives."""
    negative = torch.tensor([0.5, -2.0, 0.2, -0.1])
    positive = torch.tensor([-0.5, 2.0, -0.2])
    batch = packed(negative, positive, 0.0)
    drift = batch.mask.double() * -3.0
    sequences = Sequences.from_batch(batch, lambda sums: sums)
    kept = off_policy_mask(drift, torch.zeros_like(drift), batch.advantages, sequences, limit=1.0)
    of_sequence = [kept[(batch.sequence_index == i) & batch.mask.bool()] for i in range(3)]
    by_sample = dict(zip(batch.sample_ids, (values.tolist() for values in of_sequence), strict=True))
    assert (by_sample[0], by_sample[1]) == ([0.0] * 4, [1.0] * 3)


@pytest.mark.parametrize("kind", ["random", "largest"])
@pytest.mark.parametrize("max_tokens", [40, 10_000])
def test_tokens_of_high_covariance_are_those_of_the_whole_update(
    parallel: Parallel, kind: Literal["random", "largest"], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl has them within a micro-batch: the largest covariances, or a few of those between two bounds."""
    monkeypatch.setattr(policy_losses, "COV_SHARE", 0.1)
    update = draw_update((9, 30, 17, 24, 3), (0, 0, 1, 1, 1), seed=4)
    advantages = [0.3, -2.0, 1.5, -0.7, 2.0]
    batches, _ = to_microbatches(update, AlgorithmConfig(), max_tokens, advantages)
    marked = with_covariances(batches, kind, parallel)
    found = {
        i: values.tolist()
        for batch in marked
        for i, values in zip(batch.sample_ids, gather_responses(batch.high_covariance, batch), strict=True)
    }
    a = np.repeat(advantages, update.lengths)
    old = np.concatenate(update.old).astype(np.float64)
    c = (a - a.mean()) * (old - old.mean())
    selected = np.concatenate([found[i] for i in range(5)])
    if kind == "largest":
        assert selected.tolist() == [index in np.argsort(c)[-8:] for index in range(83)]
    else:
        assert 8 < ((c > 1) & (c < 5)).sum() < 83
        assert selected.sum() == 8
        assert ((c > 1) & (c < 5))[selected].all()
    (whole,), _ = to_microbatches(update, AlgorithmConfig(), 10_000, advantages)
    (again,) = with_covariances([whole], kind, parallel)
    of_samples = zip(again.sample_ids, gather_responses(again.high_covariance, again), strict=True)
    assert {i: values.tolist() for i, values in of_samples} == found
    assert len(policy_losses.token_draws(whole)[whole.in_loss].unique()) == 83  # each token draws its own number


@pytest.mark.parametrize("weights", [WEIGHTS, (0.0, 0.0, 0.0)])
def test_the_tokens_of_high_entropy_are_among_those_that_train(
    parallel: Parallel, weights: tuple[float, float, float]
) -> None:
    batch = packed(weights=weights)
    entropies = torch.where(batch.in_loss, torch.arange(len(batch.mask)) / 100, 5.0)
    batch = replace(batch, entropy_weight=1 / 7)
    (found,) = with_old_logprobs([batch], [torch.stack([batch.rollout_logprobs, entropies])], 0.5, parallel)
    trained = entropies[batch.in_loss]
    kept = trained >= found.entropy_floor
    if len(trained):
        assert found.entropy_floor == pytest.approx(float(trained.quantile(0.5)))
        assert found.entropy_weight == pytest.approx(1 / int(kept.sum()))
    else:
        assert found.entropy_floor == -math.inf
