"""Training metrics against numpy on the unpacked tokens."""

from typing import Any

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.loss_metrics import MAXIMA, SUMS, compute_metrics, merge_reports
from grpo_mp.algorithms.settings import AlgorithmConfig
from tests.algorithms.objective import UpdateData, draw_update, loss_of, objective, to_microbatches

ALGORITHM = AlgorithmConfig.model_validate({"kl": {"coef": 0.3}, "clip": {"low": 0.1, "high": 0.25}})
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1)


def report(
    update: UpdateData, max_tokens: int, entropy: float = 0.7, algorithm: AlgorithmConfig = ALGORITHM
) -> dict[str, float]:
    batches, logprobs = to_microbatches(update, algorithm, max_tokens)
    loss = loss_of(algorithm)
    reports = [
        loss(values, torch.full_like(values, entropy), batch)[1]
        for batch, values in zip(batches, logprobs, strict=True)
    ]
    sums, maxima = merge_reports(reports)
    return compute_metrics(dict(zip((*SUMS, *MAXIMA), torch.cat([sums, maxima]).tolist(), strict=True)))


def by_numpy(update: UpdateData) -> dict[str, Any]:
    new, rollout, old, reference = (
        np.concatenate([sample.astype(np.float64) for sample in values or ()])
        for values in (update.logprobs, update.rollout, update.old, update.reference)
    )
    rewards = np.array(update.rewards)
    mean = np.array([rewards[np.array(GROUPS) == group].mean() for group in GROUPS])
    advantages = np.repeat(rewards - mean, update.lengths)
    ratio = np.exp(new - old)
    difference = np.abs(new - rollout)
    high = (ratio > 1.25) & (advantages > 0)
    low = (ratio < 0.9) & (advantages < 0)
    return {
        "train/loss": objective(update, ALGORITHM).loss,
        "train/pg_loss": objective(update, ALGORITHM.model_copy(update={"kl": AlgorithmConfig().kl})).loss,
        "train/kl_loss": (np.exp(reference - new) - (reference - new) - 1).mean(),
        "train/entropy": 0.7,
        "train/ppo_kl": (old - new).mean(),
        "train/pg_clipfrac": (high | low).mean(),
        "train/pg_clipfrac_low": low.mean(),
        "train/pg_clipfrac_high": high.mean(),
        "train/ratio/mean": ratio.mean(),
        "train/ratio/max": ratio.max(),
        "train/ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "mismatch/correction/mean": 1.0,
        "mismatch/correction_masked_ratio": 0.0,
        "mismatch/off_policy_masked_ratio": 0.0,
        "mismatch/tokens_without_rollout_logprob": 0.0,
        "mismatch/logprob_abs_diff/mean": difference.mean(),
        "mismatch/logprob_abs_diff/max": difference.max(),
        "mismatch/token_mult_prob_error": np.exp(difference).mean(),
        "mismatch/kl": (np.exp(new - rollout) - (new - rollout) - 1).mean(),
        "mismatch/band": 0,
        "mismatch/pearson": np.corrcoef(np.exp(rollout), np.exp(new))[0, 1],
    }


@pytest.mark.parametrize("max_tokens", [10_000, 16])
def test_every_metric_is_numpy_s_however_the_tokens_are_packed(max_tokens: int) -> None:
    update = draw_update((1, 9, 2, 30, 17, 4, 4, 1), GROUPS, seed=3)
    expected = by_numpy(update)
    assert 0 < expected["train/pg_clipfrac_low"] != expected["train/pg_clipfrac_high"] > 0
    actual = report(update, max_tokens)
    assert actual == pytest.approx(expected, rel=2e-6)


LENGTHS = (1, 9, 2, 30, 17, 4, 4, 1)


@pytest.mark.parametrize("log_ratio_std", [0.3, 30.0])
@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token", "product"])
def test_ratios_follow_the_algorithm_and_kl_is_per_token(ratio: str, log_ratio_std: float) -> None:
    """Whole answers' ratios pass any float64: they count as e^300. KL and drift are per token, whatever the level."""
    update = draw_update(LENGTHS, GROUPS, seed=3, log_ratio_std=log_ratio_std)
    assert update.old is not None
    assert update.reference is not None
    log_ratios = [new.astype(np.float64) - old for new, old in zip(update.logprobs, update.old, strict=True)]
    reduce = {"token": lambda x: x, "product": np.sum}.get(ratio, np.mean)
    logs = np.concatenate([np.broadcast_to(reduce(values), values.shape) for values in log_ratios]).clip(max=300)
    weights = np.exp(logs - logs.max())
    algorithm = AlgorithmConfig.model_validate({"ratio": ratio, "kl": {"coef": 0.1, "level": "sequence"}})
    actual = report(update, 10_000, algorithm=algorithm)
    reference = np.concatenate(update.reference).astype(np.float64)
    new = np.concatenate(update.logprobs)
    assert actual["train/ratio/max"] == pytest.approx(np.exp(logs.max()), rel=1e-5)
    assert actual["train/ess"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / len(weights), rel=1e-5)
    assert actual["train/ppo_kl"] == pytest.approx(-np.concatenate(log_ratios).mean(), rel=1e-5)
    assert actual["train/kl_loss"] == pytest.approx((np.exp(reference - new) - (reference - new) - 1).mean(), rel=1e-5)


@pytest.mark.parametrize("loss", ["clip", "gmpo", "sapo", "vespo", "unclipped"])
@pytest.mark.parametrize("dual_clip", [None, 1.6])
def test_clipped_tokens_are_those_without_a_gradient(loss: str, dual_clip: float | None) -> None:
    """Autograd says which tokens the loss does not teach: none where it has no clip."""
    parts = {"policy_loss": loss, "clip": {"low": 0.1, "high": 0.25, "dual_clip": dual_clip}}
    algorithm = AlgorithmConfig.model_validate(parts)
    update = draw_update((1, 9, 2, 30, 17, 4, 4, 1), GROUPS, seed=3, kl=False, log_ratio_std=0.4)
    gradients = objective(update, algorithm).gradients
    has_advantage = np.concatenate([np.full(len(one), bool(one.any())) for one in gradients])
    assert has_advantage.all()
    silent = (torch.cat(gradients) == 0).double().mean()
    assert (silent > 0.1) == (loss in ("clip", "gmpo"))
    assert report(update, 16, algorithm=algorithm)["train/pg_clipfrac"] == pytest.approx(float(silent))


def test_the_first_update_has_ratio_one_and_clips_nothing() -> None:
    actual = report(draw_update((5, 6), (0, 0), seed=0, first_update=True, kl=False), 10_000)
    assert (actual["train/ratio/mean"], actual["train/ratio/max"]) == (1.0, 1.0)
    assert actual["train/pg_clipfrac"] == actual["train/ppo_kl"] == 0.0
    assert "train/kl_loss" not in actual  # there is no reference


@pytest.mark.parametrize("place", [0, -1])
def test_a_ratio_that_is_no_number_shows_in_mean_and_maximum(place: int) -> None:
    update = draw_update(LENGTHS, GROUPS, seed=3)
    update.logprobs[place][0] = np.nan
    actual = report(update, 16)
    assert np.isnan(actual["train/ratio/mean"])
    assert max(1.0, actual["train/ratio/max"]) == max(actual["train/ratio/max"], 1.0) == np.inf
