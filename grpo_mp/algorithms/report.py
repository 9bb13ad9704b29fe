"""Sums over response tokens that become the training metrics once they are reduced over the job."""

import torch
from torch import Tensor

from grpo_mp.algorithms.policy_losses import TokenTerms
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.types import MicroBatch

SUMS = (
    "loss",
    "pg_loss",
    "tokens",
    "entropy",
    "kl",
    "kl_tokens",
    "ratio",
    "ratio2",
    "clipped_low",
    "clipped_high",
    "drift",
    "mismatch",
    "mismatch_ratio",
    "mismatch_kl",
    "engine_p",
    "policy_p",
    "engine_p2",
    "policy_p2",
    "both_p",
    "correction",
    "corrected_away",
    "off_policy_masked",
    "no_rollout_logprob",
)
MAX_LOG_RATIO = 300.0  # the square of its exponential is still a float64
MAXIMA = ("ratio_max", "mismatch_max")


def loss_report(
    batch: MicroBatch, terms: TokenTerms, entropy: Tensor, kl: Tensor, on_policy: Tensor, algorithm: AlgorithmConfig
) -> dict[str, Tensor]:
    """Compute sums (and maxima) over the response tokens of one micro-batch; all inputs are [T] in float64.

    `on_policy`: 1, or 0 where the off-policy mask takes a token out.
    """
    mask, ratio = batch.mask.double(), terms.log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()

    def total(values: Tensor) -> Tensor:
        return (values * mask).sum()

    return {
        "tokens": mask.sum(),
        "entropy": total(entropy),
        "kl": total(kl),
        "kl_tokens": mask.sum() * (batch.reference_logprobs is not None),
        "ratio": total(ratio),
        "ratio2": total(ratio.square()),
        "clipped_low": total((ratio < 1 - algorithm.clip.low) & (batch.advantages < 0)),
        "clipped_high": total((ratio > 1 + algorithm.clip.high) & (batch.advantages > 0)),
        "drift": total(-terms.token_log_ratio.detach()),
        "ratio_max": (ratio * mask).max(),
        "correction": total(terms.correction),
        "corrected_away": total(terms.correction == 0),
        "off_policy_masked": total(on_policy == 0),
        **_mismatch(batch, terms.new.detach(), mask),
    }


def _mismatch(batch: MicroBatch, logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compare engine and policy over the tokens with a finite rollout logprob."""
    has_rollout_logprob = batch.rollout_logprobs.isfinite()
    rollout = batch.rollout_logprobs.where(has_rollout_logprob, logprobs)
    difference = logprobs - rollout
    abs_difference, engine, policy = difference.abs() * mask, rollout.exp(), logprobs.exp()

    def total(values: Tensor) -> Tensor:
        return (values * mask).sum()

    return {
        "mismatch": abs_difference.sum(),
        "mismatch_ratio": total(abs_difference.exp()),
        "mismatch_kl": total(difference.exp() - 1 - difference),  # k3
        "engine_p": total(engine),
        "policy_p": total(policy),
        "engine_p2": total(engine**2),
        "policy_p2": total(policy**2),
        "both_p": total(engine * policy),
        "mismatch_max": abs_difference.max(),
        "no_rollout_logprob": total(~has_rollout_logprob),
    }


def metrics(sums: dict[str, float]) -> dict[str, float]:
    """Compute the metrics of one update from its reduced sums and maxima; without reference logprobs there is no KL."""
    tokens = max(sums["tokens"], 1.0)
    mean = {name: sums[name] / tokens for name in SUMS}
    covariance = mean["both_p"] - mean["engine_p"] * mean["policy_p"]
    variances = (mean["engine_p2"] - mean["engine_p"] ** 2) * (mean["policy_p2"] - mean["policy_p"] ** 2)
    kl = {"train/kl_loss": sums["kl"] / sums["kl_tokens"]} if sums["kl_tokens"] else {}
    return {
        **kl,
        "train/loss": sums["loss"],
        "train/pg_loss": sums["pg_loss"],
        "train/entropy": mean["entropy"],
        "train/ppo_kl": mean["drift"],
        "train/pg_clipfrac": mean["clipped_low"] + mean["clipped_high"],
        "train/pg_clipfrac_low": mean["clipped_low"],
        "train/pg_clipfrac_high": mean["clipped_high"],
        "train/ratio/mean": mean["ratio"],
        "train/ratio/max": sums["ratio_max"],
        "mismatch/logprob_abs_diff/mean": mean["mismatch"],
        "mismatch/logprob_abs_diff/max": sums["mismatch_max"],
        "mismatch/token_mult_prob_error": mean["mismatch_ratio"],
        "mismatch/kl": mean["mismatch_kl"],
        "mismatch/band": mismatch_band(mean["mismatch_ratio"]),
        "train/effective_samples": mean["ratio"] ** 2 / mean["ratio2"] if mean["ratio2"] > 0 else 1.0,
        "mismatch/correction/mean": mean["correction"],
        "mismatch/corrected_away_ratio": mean["corrected_away"],
        "mismatch/off_policy_masked_ratio": mean["off_policy_masked"],
        "mismatch/unheard_tokens": sums["no_rollout_logprob"],
        "mismatch/pearson": covariance / variances**0.5 if variances > 0 else 1.0,
    }


def mismatch_band(token_mult_prob_error: float) -> int:
    """Return 0 (good), 1 (watch) or 2 (stop): bounds 1.05 and 1.5, as NeMo-RL's users have them; 2 for NaN."""
    return int(not token_mult_prob_error <= 1.05) + int(not token_mult_prob_error <= 1.5)


def merge(reports: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge micro-batch reports into sums [len(SUMS)] and maxima [len(MAXIMA)], float64 on the CPU, ready to reduce."""
    if not reports:
        return torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)
    sums = torch.stack([torch.stack([report[name] for name in SUMS]) for report in reports]).sum(0)
    maxima = torch.stack([torch.stack([report[name] for name in MAXIMA]) for report in reports]).amax(0)
    return sums.cpu(), maxima.cpu()
