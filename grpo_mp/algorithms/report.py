"""Sums over response tokens that become the training metrics once they are reduced over the job."""

import torch
from torch import Tensor

from grpo_mp.algorithms.policy_losses import Terms
from grpo_mp.algorithms.settings import Algorithm
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
    "mistrusted",
    "unheard",
)
LARGEST_LOG_RATIO = 300.0  # its square, too, is a float64
MAXIMA = ("ratio_max", "mismatch_max")


def loss_report(
    batch: MicroBatch, terms: Terms, entropy: Tensor, kl: Tensor, trusted: Tensor, algorithm: Algorithm
) -> dict[str, Tensor]:
    """Sums (and maxima) over the response tokens of one micro-batch; all values [T] in float64."""
    mask, log_ratio = batch.mask.double(), terms.log_ratio.detach().clamp(max=LARGEST_LOG_RATIO)

    def total(values: Tensor) -> Tensor:
        return (values * mask).sum()

    ratio, up, down = log_ratio.exp(), batch.advantages > 0, batch.advantages < 0
    return {
        "tokens": mask.sum(),
        "entropy": total(entropy),
        "kl": total(kl),
        "kl_tokens": mask.sum() * (batch.reference_logprobs is not None),
        "ratio": total(ratio),
        "ratio2": total(ratio.square()),
        "clipped_low": total((ratio < 1 - algorithm.clip.low) & down),
        "clipped_high": total((ratio > 1 + algorithm.clip.high) & up),
        "drift": total(-terms.token_log_ratio.detach()),
        "ratio_max": (ratio * mask).max(),
        "correction": total(terms.correction),
        "corrected_away": total(terms.correction == 0),
        "mistrusted": total(trusted == 0),
        **_mismatch(batch, terms.new.detach(), mask),
    }


def _mismatch(batch: MicroBatch, logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Engine against policy, over the tokens whose engine logprob is a number."""
    has_rollout_logprob = batch.rollout_logprobs.isfinite()
    rollout = batch.rollout_logprobs.where(has_rollout_logprob, logprobs)
    apart, engine, policy = (logprobs - rollout).abs() * mask, rollout.exp(), logprobs.exp()

    def total(values: Tensor) -> Tensor:
        return (values * mask).sum()

    return {
        "mismatch": apart.sum(),
        "mismatch_ratio": total(apart.exp()),
        "mismatch_kl": total((logprobs - rollout).exp() - 1 - (logprobs - rollout)),  # k3
        "engine_p": total(engine),
        "policy_p": total(policy),
        "engine_p2": total(engine**2),
        "policy_p2": total(policy**2),
        "both_p": total(engine * policy),
        "mismatch_max": apart.max(),
        "unheard": total(~has_rollout_logprob),
    }


def metrics(sums: dict[str, float]) -> dict[str, float]:
    """Reduced sums and maxima of one update -> metric values; no KL where no reference logprob was computed."""
    tokens = max(sums["tokens"], 1.0)
    mean = {name: sums[name] / tokens for name in SUMS}
    covariance = mean["both_p"] - mean["engine_p"] * mean["policy_p"]
    spread = (mean["engine_p2"] - mean["engine_p"] ** 2) * (mean["policy_p2"] - mean["policy_p"] ** 2)
    measured = {"train/kl_loss": sums["kl"] / sums["kl_tokens"]} if sums["kl_tokens"] else {}
    return {
        **measured,
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
        "mismatch/off_policy_masked_ratio": mean["mistrusted"],
        "mismatch/unheard_tokens": sums["unheard"],
        "mismatch/pearson": covariance / spread**0.5 if spread > 0 else 1.0,
    }


def mismatch_band(token_mult_prob_error: float) -> int:
    """0 good, 1 watch, 2 stop: bounds 1.05 and 1.5, as NeMo-RL's users have them."""
    return int(not token_mult_prob_error <= 1.05) + int(not token_mult_prob_error <= 1.5)


def merge(reports: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Micro-batch reports -> (sums [len(SUMS)], maxima [len(MAXIMA)]) in float64 on the host, ready to reduce."""
    if not reports:
        return torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)
    sums = torch.stack([torch.stack([report[name] for name in SUMS]) for report in reports]).sum(0)
    maxima = torch.stack([torch.stack([report[name] for name in MAXIMA]) for report in reports]).amax(0)
    return sums.cpu(), maxima.cpu()
