"""Sums and maxima over response tokens, which are reduced over the job and become the training metrics."""

import math

import torch
from torch import Tensor

from grpo_mp.algorithms.policy_losses import TokenTerms, TopkTerms, within_divergence
from grpo_mp.algorithms.registries import policy_loss_entry
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.utils.types import MicroBatch

MEANS = (  # metrics that are means over the response tokens
    "train/entropy",
    "train/ppo_kl",
    "train/pg_clipfrac",
    "train/pg_clipfrac_low",
    "train/pg_clipfrac_high",
    "train/ratio/mean",
    "mismatch/logprob_abs_diff/mean",
    "mismatch/token_mult_prob_error",
    "mismatch/kl",
    "mismatch/correction/mean",
    "mismatch/correction_masked_ratio",
    "mismatch/off_policy_masked_ratio",
)
KEPT_MASS = "mismatch/mass_outside_kept"
TOTALS = ("train/loss", "train/pg_loss", "mismatch/tokens_without_rollout_logprob")
PROBABILITIES = ("engine_p", "policy_p", "engine_p2", "policy_p2", "both_p")
DISTILL_MEANS = {
    "distill/kl/mean": "divergence",
    "distill/teacher_mass": "teacher_mass",
    "distill/student_mass": "policy_mass",
}
COUNTS = ("tokens", "kl_tokens", "topk_tokens", "kept_tokens")
SUMS = (*MEANS, *TOTALS, *PROBABILITIES, *DISTILL_MEANS, *COUNTS, KEPT_MASS, "ratio2", "kl")
MAXIMA = ("train/ratio/max", "mismatch/logprob_abs_diff/max", "distill/kl/max")
MAX_SQUARED_LOG_RATIO = 300.0  # the squared ratio still fits into float64


def loss_report(
    batch: MicroBatch, terms: TokenTerms, entropy: Tensor, kl: Tensor, on_policy: Tensor, algorithm: AlgorithmConfig
) -> dict[str, Tensor]:
    """Compute the sums and maxima of RL, except the losses, over a micro-batch's response tokens; inputs: float64 [T].

    `on_policy`: 0 for tokens that the off-policy mask removes, else 1. Engine and policy are compared on tokens with a
    finite rollout logprob.
    """
    mask = batch.mask.double()
    ratio = terms.log_ratio.detach().clamp(max=MAX_SQUARED_LOG_RATIO).exp()
    new = terms.new.detach()
    has_rollout_logprob = batch.rollout_logprobs.isfinite()
    rollout = batch.rollout_logprobs.where(has_rollout_logprob, new)
    difference = new - rollout
    abs_difference = difference.abs() * mask
    engine = rollout.exp()
    policy = new.exp()
    by_token = {
        "train/entropy": entropy,
        "train/ppo_kl": -terms.token_log_ratio.detach(),
        **_clipped(terms, ratio, algorithm),
        "train/ratio/mean": ratio,
        "mismatch/logprob_abs_diff/mean": abs_difference,
        "mismatch/token_mult_prob_error": abs_difference.exp(),
        "mismatch/kl": difference.exp() - 1 - difference,  # k3
        "mismatch/correction/mean": terms.correction,
        "mismatch/correction_masked_ratio": terms.correction == 0,
        "mismatch/off_policy_masked_ratio": on_policy == 0,
        "mismatch/tokens_without_rollout_logprob": ~has_rollout_logprob,
        "engine_p": engine,
        "policy_p": policy,
        "engine_p2": engine**2,
        "policy_p2": policy**2,
        "both_p": engine * policy,
        "ratio2": ratio.square(),
        "tokens": torch.ones_like(mask),
        KEPT_MASS: torch.zeros_like(mask) if batch.kept_log_mass is None else -batch.kept_log_mass.double().expm1(),
        "kept_tokens": torch.full_like(mask, batch.kept_log_mass is not None),
        "kl": kl,
        "kl_tokens": torch.full_like(mask, batch.reference_logprobs is not None),
    }
    maxima = {"train/ratio/max": (ratio * mask).max(), "mismatch/logprob_abs_diff/max": abs_difference.max()}
    return {name: (values * mask).sum() for name, values in by_token.items()} | maxima


def topk_report(batch: MicroBatch, topk: TopkTerms | None) -> dict[str, Tensor]:
    """Compute the sums and the maximum of top-k distillation over a micro-batch's response tokens; 0 without it."""
    mask = batch.mask.double()
    values = {name: torch.zeros_like(mask) if topk is None else vars(topk)[of] for name, of in DISTILL_MEANS.items()}
    sums = {name: (of_tokens.detach() * mask).sum() for name, of_tokens in values.items()}
    largest = (values["distill/kl/mean"].detach() * mask).max()
    return {**sums, "topk_tokens": mask.sum() * (topk is not None), "distill/kl/max": largest}


def _clipped(terms: TokenTerms, ratio: Tensor, algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """Return which tokens are clipped, at each bound and at any, bool [T]; all False for a loss without a clip."""
    entry = policy_loss_entry(algorithm.policy_loss)
    clip = algorithm.clip
    is_negative = terms.advantages < 0
    is_positive = terms.advantages > 0
    if entry.divergence:
        outside = ~within_divergence(terms, algorithm, entry.divergence)
        low = outside & is_negative
        high = outside & is_positive
    else:
        low = (ratio < 1 - clip.low) & is_negative
        high = (ratio > 1 + clip.high) & is_positive
    is_dual = torch.zeros_like(low)
    if clip.dual_clip is not None and entry.has_dual_clip:
        is_dual = (ratio > clip.dual_clip) & (is_negative | is_positive)
    if entry.covariance == "random" and terms.high_covariance is not None:
        is_dual = is_dual | terms.high_covariance
    has_clip = torch.full_like(low, "clip" in entry.reads)
    return {
        "train/pg_clipfrac": (low | high | is_dual) & has_clip,
        "train/pg_clipfrac_low": low & has_clip,
        "train/pg_clipfrac_high": high & has_clip,
    }


def compute_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Compute the metrics of one update from its reduced sums and maxima; the KL needs reference logprobs."""
    mean = {name: sums[name] / max(sums["tokens"], 1.0) for name in SUMS}
    covariance = mean["both_p"] - mean["engine_p"] * mean["policy_p"]
    variances = (mean["engine_p2"] - mean["engine_p"] ** 2) * (mean["policy_p2"] - mean["policy_p"] ** 2)
    kl = {"train/kl_loss": sums["kl"] / sums["kl_tokens"]} if sums["kl_tokens"] else {}
    distill = {name: sums[name] / sums["topk_tokens"] for name in DISTILL_MEANS} if sums["topk_tokens"] else {}
    return {
        **kl,
        **({KEPT_MASS: sums[KEPT_MASS] / sums["kept_tokens"]} if sums["kept_tokens"] else {}),
        **(distill and distill | {"distill/kl/max": sums["distill/kl/max"]}),
        **{name: mean[name] for name in MEANS},
        **{name: sums[name] for name in (*TOTALS, "train/ratio/max", "mismatch/logprob_abs_diff/max")},
        "train/ess": mean["train/ratio/mean"] ** 2 / mean["ratio2"] if mean["ratio2"] > 0 else 1.0,
        "mismatch/band": mismatch_band(mean["mismatch/token_mult_prob_error"]),
        "mismatch/pearson": covariance / variances**0.5 if variances > 0 else 1.0,
    }


def mismatch_band(token_mult_prob_error: float) -> int:
    """Return 0 (good), 1 (watch) or 2 (stop), with the bounds 1.05 and 1.5 of NeMo-RL's users; 2 for NaN."""
    return int(not token_mult_prob_error <= 1.05) + int(not token_mult_prob_error <= 1.5)


def merge_reports(reports: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge micro-batch reports into sums [len(SUMS)] and maxima [len(MAXIMA)], float64 on the CPU.

    A NaN among the maxima becomes infinity, because the maximum over ranks or updates may drop a NaN.
    """
    if not reports:
        return torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)
    sums = torch.stack([torch.stack([report[name] for name in SUMS]) for report in reports]).sum(0)
    maxima = torch.stack([torch.stack([report[name] for name in MAXIMA]) for report in reports]).amax(0)
    return sums.cpu(), maxima.where(~maxima.isnan(), math.inf).cpu()
