"""Losses of a micro-batch for RL and SFT, and the adaptive coefficients."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_mp.algorithms.loss_metrics import loss_report, topk_report
from grpo_mp.algorithms.policy_losses import PolicyLoss, Reduce, Sequences, TokenTerms, topk_terms
from grpo_mp.algorithms.registries import POLICY_LOSSES, policy_loss_entry
from grpo_mp.algorithms.settings import (
    AlgorithmConfig,
    EarlyStopConfig,
    KLConfig,
    MaskName,
    RatioLevel,
    RolloutCorrectionConfig,
)
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch, PerToken

MicroBatchLoss = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
MAX_LOG_RATIO = 700.0  # exp(709) is close to the largest float64
CONTROL_TOKEN_WEIGHT = 1e-3  # of a response's first token in aggregation decoupled, as in Thinkless' script
MAX_DRIFT = 20.0  # nats, as in verl
MAX_KL = 10.0  # per token, for k3_clamped


@dataclass(frozen=True)
class LossCoefficients:
    """Coefficients of KL and entropy in the loss, after adaptation."""

    kl: float
    entropy: float


def make_loss(
    algorithm: AlgorithmConfig,
    coefficients: LossCoefficients,
    reduce: Reduce,
    policy_loss: PolicyLoss,
) -> MicroBatchLoss:
    """Return the function of a micro-batch that returns its share of the update's loss, and sums for the metrics.

    `reduce`: sums a tensor over the ranks that hold parts of the same sequences. A batch without `old_logprobs` belongs
    to the first update of a rollout, whose old policy is the current policy.
    """
    kl_coefficient = coefficients.kl if algorithm.kl.apply_to == "loss" else 0.0
    distillation = algorithm.distillation

    def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        batch = _mask_logprobs(batch.to(logprobs.device))
        new = _masked(logprobs, batch.mask)
        entropy = _masked(entropy, batch.mask)
        has_rollout_logprob = batch.rollout_logprobs.isfinite()  # a token without one is masked out of the loss
        terms = _token_terms(new, batch, algorithm, Sequences.from_batch(batch, reduce))
        entropy_mask = (entropy.detach() >= batch.entropy_floor) & has_rollout_logprob
        on_policy = off_policy_mask(
            new,
            batch.rollout_logprobs,
            advantages=batch.advantages,
            sequences=terms.sequences,
            limit=algorithm.rollout_correction.off_policy_mask_threshold,
        ) * rejection_mask(
            new.detach() - terms.token_log_ratio.detach() if algorithm.old_logprobs == "recomputed" else new.detach(),
            batch.rollout_logprobs,
            terms.sequences,
            algorithm.rollout_correction.masks,
        )
        token_losses = _token_losses(policy_loss, terms, algorithm) * on_policy * entropy_mask
        weighted_policy_loss = (token_losses * batch.loss_weights).sum()
        kl = _kl(terms, batch, algorithm.kl, algorithm.kl.level) * has_rollout_logprob
        kl_loss = kl_coefficient * (kl * batch.loss_weights).sum() if kl_coefficient else 0.0  # 0 x inf would be NaN
        entropy_bonus = (entropy * entropy_mask * batch.in_loss).sum() * batch.entropy_weight
        topk = topk_terms(batch, distillation) if distillation else None
        total = weighted_policy_loss + kl_loss - coefficients.entropy * entropy_bonus
        if topk and distillation:
            total = total + distillation.coef * (topk.divergence * batch.loss_weights).sum()
        token_kl = _kl(terms, batch, algorithm.kl, "token").detach() * has_rollout_logprob
        report = loss_report(batch, terms, entropy.detach(), kl=token_kl, on_policy=on_policy, algorithm=algorithm)
        return total.to(logprobs.dtype), report | topk_report(batch, topk) | {
            "train/loss": total.detach(),
            "train/pg_loss": weighted_policy_loss.detach(),
        }

    return loss


def load_policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the policy loss that the settings name."""
    return POLICY_LOSSES.resolve(algorithm.policy_loss, "algorithm.policy_loss")


def _token_losses(policy_loss: PolicyLoss, terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Return the policy loss of each token [T], times the rollout correction unless the loss applies it itself."""
    losses = policy_loss(terms, algorithm)
    if losses.shape != terms.new.shape:
        raise UserError(
            f"algorithm.policy_loss {algorithm.policy_loss!r} returned shape {list(losses.shape)} for {len(terms.new)} "
            "tokens: return one loss for each token"
        )
    return losses if policy_loss_entry(algorithm.policy_loss).applies_correction else losses * terms.correction


def _token_terms(new: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig, sequences: Sequences) -> TokenTerms:
    old = new.detach() if batch.old_logprobs is None else batch.old_logprobs
    rollout = batch.rollout_logprobs
    if algorithm.old_logprobs == "engine":
        old = rollout.where(rollout.isfinite(), new.detach())
    token_log_ratio = (new - old).clamp(max=MAX_LOG_RATIO)
    return TokenTerms(
        new,
        token_log_ratio,
        log_ratio=_log_ratio(token_log_ratio, sequences, algorithm.ratio).clamp(max=MAX_LOG_RATIO),
        advantages=batch.advantages,
        correction=rollout_is_weights(old, rollout, sequences, algorithm.rollout_correction),
        sequences=sequences,
        high_covariance=batch.high_covariance,
        positive=batch.positive,
    )


def _log_ratio(token_log_ratio: Tensor, sequences: Sequences, level: RatioLevel) -> Tensor:
    """Return the log of the importance ratio at the level that `algorithm.ratio` names, [T] -> [T].

    token: pi / pi_old of the token (PPO; DeepSeekMath, eq. 3).
    sequence: s = (pi / pi_old of the sequence)^(1 / tokens) (GSPO, arXiv 2507.18071, eq. 7).
    sequence_token: sg(s) pi / sg(pi), sg: stop-gradient; the sequence's value, the token's gradient (GSPO, eq. 14).
    product: pi / pi_old of the sequence (DeepSeek-R1, arXiv 2501.12948, eq. 1; RLOO, arXiv 2402.14740).
    """
    match level:
        case "token":
            return token_log_ratio
        case "sequence":
            return sequences.means(token_log_ratio)
        case "sequence_token":
            return sequences.means(token_log_ratio.detach()) + token_log_ratio - token_log_ratio.detach()
        case "product":
            return sequences.sums(token_log_ratio)


def _kl(terms: TokenTerms, batch: MicroBatch, kl: KLConfig, level: str) -> Tensor:
    """Estimate KL(policy || reference) [T]: of each token, or of its whole sequence (R1, eq. 2)."""
    if batch.reference_logprobs is None:
        return torch.zeros_like(terms.new)
    log_r = batch.reference_logprobs - terms.new
    if level == "sequence":
        log_r = terms.sequences.sums(log_r).clamp(max=MAX_LOG_RATIO)
    return estimate_kl(kl, log_r, terms.log_ratio.exp())


def estimate_kl(kl: KLConfig, log_r: Tensor, ratio: Tensor) -> Tensor:
    """Estimate KL(policy || reference) with `kl.estimator`, from log r = reference - policy logprob, [T] -> [T].

    k1, k2, k3: Schulman, Approximating KL divergence (2020), with r = reference / policy.
    k1: unbiased, may be negative; its gradient has mean 0.
    k2: biased in value; on policy, its mean gradient is the gradient of KL(policy || reference).
    k3: unbiased and never negative (DeepSeekMath, eq. 4); its mean gradient is the gradient of KL(reference || policy).
    k3_clamped: k3 within [-MAX_KL, MAX_KL], so that no token dominates.
    k3_unbiased: k3 x importance ratio, with its gradient: also off policy, value and gradient are those of KL(policy ||
    reference) (DeepSeek-V3.2, arXiv 2512.02556).
    """
    match kl.estimator:
        case "k1":
            return -log_r
        case "k2":
            return log_r.square() / 2
        case "k3":
            return log_r.exp() - 1 - log_r
        case "k3_clamped":
            return (log_r.exp() - 1 - log_r).clamp(-MAX_KL, MAX_KL)
        case "k3_unbiased":
            return (log_r.exp() - 1 - log_r) * ratio


def rollout_is_weights(
    old: Tensor, rollout: Tensor, sequences: Sequences, correction: RolloutCorrectionConfig
) -> Tensor:
    """Compute w = old / rollout of each token, or their product over the sequence, limited to [low, high]: [T].

    truncate: w is clamped (TIS, Yao et al. 2025). mask: w outside of the limits becomes 0 (MIS, Liu et al. 2025; with
    level token and [0.5, 5] it is IcePop, Ling team 2025). A token without a finite rollout logprob has w = 1.
    """
    if correction.kind == "none":
        return torch.ones_like(old)
    log_w = (old - rollout).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if correction.level == "sequence":
        log_w = sequences.sums(log_w)
    w = log_w.exp()
    if correction.kind == "truncate":
        return w.clamp(correction.low, correction.high)
    low = correction.low or 0.0
    high = correction.high if correction.high is not None else torch.inf
    return w.where((w >= low) & (w <= high), 0.0)


def off_policy_mask(
    new: Tensor, rollout: Tensor, advantages: Tensor, sequences: Sequences, limit: float | None
) -> Tensor:
    """Return 0 for sequences with a negative advantage and a mean of rollout - new above `limit`, else 1: [T].

    Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, eq. 9. If advantages differ by token, their mean over
    the sequence decides.
    """
    if limit is None:
        return torch.ones_like(new)
    drift = sequences.means((rollout - new.detach()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return ((sequences.means(advantages) >= 0) | (drift <= limit)).double()


def rejection_mask(
    policy: Tensor, rollout: Tensor, sequences: Sequences, masks: Mapping[MaskName, tuple[float, float]]
) -> Tensor:
    """Return 1 for tokens inside all limits of `masks`, else 0: [T]. `policy`, `rollout`: logprobs of the tokens.

    A mask is named as in verl's rollout_rs: a level, and an estimate of the KL of the engine from the policy, with
    x = policy - rollout, within 20 nats (limits: RolloutCorrectionConfig). token: of each token; seq_sum, seq_mean,
    seq_max: sum, mean and maximum over the sequence, which is masked as a whole. k1: -x; k2: x^2 / 2; k3: e^x - 1 - x.
    seq_mean_k1 is the geometric-mean mask (Liu et al., When speed kills stability, 2025), seq_max the trust-region mask
    of arXiv 2512.23075. A token without a finite rollout logprob has x = 0.
    """
    x = (policy - rollout).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-MAX_DRIFT, MAX_DRIFT)
    estimates = {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - 1 - x}
    inside = torch.ones_like(x, dtype=torch.bool)
    for name, (low, high) in masks.items():
        level, _, estimator = name.rpartition("_")
        values = estimates[estimator]
        if estimator == "k1":  # its limits are ratios
            low = math.log(low)
            high = math.log(high)
        if level in ("seq_sum", "seq_mean"):
            values = sequences.sums(values) if level == "seq_sum" else sequences.means(values)
        within = (values >= low) & (values <= high)
        inside &= sequences.sums((~within).double()) == 0 if level == "seq_max" else within
    return inside.double()


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return values in float64, with 0 at prompts and padding, so that these affect neither loss nor gradient."""
    return values.double().where(mask.bool(), 0.0)


def _mask_logprobs(batch: MicroBatch) -> MicroBatch:
    names = ("rollout_logprobs", "old_logprobs", "reference_logprobs")
    logprobs = {name: values for name in names if (values := getattr(batch, name)) is not None}
    masked: dict[str, Any] = {name: _masked(values, batch.mask) for name, values in logprobs.items()}
    return replace(batch, **masked)


def token_weights(
    generated_tokens: Sequence[int], in_loss: Sequence[bool], algorithm: AlgorithmConfig, max_response_tokens: int
) -> list[PerToken]:
    """Return the loss weight of the generated tokens of each sample; 0 for a sample that is masked out of the loss.

    Weights come from the lengths of the whole update, so they are independent of layout, micro-batch size and packing.

    sequence_mean: mean over samples of the mean over tokens (DeepSeekMath, eq. 3).
    token_mean: mean over all tokens that have a loss (TRL, verl; DAPO, eq. 8, over the update instead of each group).
    sequence_sum: mean over samples of the sum over tokens (LUSPO; RLOO).
    constant: sum over tokens / (samples x max_response_tokens) (Dr. GRPO).
    decoupled: mean over samples of CONTROL_TOKEN_WEIGHT x first token + mean of the other tokens (Thinkless, eq. 5).
    A masked sample counts in the number of samples; its tokens do not count in the number of tokens, as in TRL.
    """
    samples = len(generated_tokens)
    loss_tokens = sum(tokens for tokens, included in zip(generated_tokens, in_loss, strict=True) if included)

    def weight(tokens: int) -> PerToken:
        match algorithm.aggregation:
            case "token_mean":
                return 1.0 / max(1, loss_tokens)
            case "sequence_sum":
                return 1.0 / samples
            case "constant":
                return 1.0 / (samples * max_response_tokens)
            case "decoupled":
                weights = torch.full((tokens,), 1.0 / max(1, tokens - 1), dtype=torch.float64)
                weights[:1] = CONTROL_TOKEN_WEIGHT
                return weights / samples
            case "sequence_mean":
                return 1.0 / (samples * max(1, tokens))

    return [weight(tokens) if included else 0.0 for tokens, included in zip(generated_tokens, in_loss, strict=True)]


KL_GAIN = 0.1
# As in TRL
ENTROPY_STEP = 0.005
MAX_ENTROPY_COEF = 1.0
MAX_KL_ERROR = 0.2

AdaptiveCoefs = Mapping[str, float]


def current_coefficients(adaptive_coefs: AdaptiveCoefs, algorithm: AlgorithmConfig) -> LossCoefficients:
    """Return the loss coefficients of the next update.

    With an entropy target, the bonus is 0 while the last measured entropy is above the target, as in TRL.
    """
    entropy = adaptive_coefs.get("entropy", algorithm.entropy.coef)
    target = algorithm.entropy.target
    if target is not None and adaptive_coefs.get("measured_entropy", float("inf")) > target:
        entropy = 0.0
    return LossCoefficients(adaptive_coefs.get("kl", algorithm.kl.coef), entropy)


def update_adaptive_coefs(
    adaptive_coefs: AdaptiveCoefs, kl: float, entropy: float, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Return the adaptive coefficients after an update with mean KL `kl` and mean entropy `entropy`, nats per token.

    KL: coef x (1 + 0.1 clip(kl / target - 1, -0.2, 0.2)) (Ziegler et al., arXiv 1909.08593, section 2.2).
    Entropy: + ENTROPY_STEP at or below the target, - ENTROPY_STEP above (Skywork-OR1, arXiv 2505.22312, section 4).
    """
    updated = dict(adaptive_coefs)
    if algorithm.kl.target is not None:
        error = min(max(kl / algorithm.kl.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
        updated["kl"] = adaptive_coefs.get("kl", algorithm.kl.coef) * (1 + KL_GAIN * error)
    bonus = algorithm.entropy
    if bonus.target is not None:
        change = ENTROPY_STEP if entropy <= bonus.target else -ENTROPY_STEP
        updated["entropy"] = min(max(adaptive_coefs.get("entropy", bonus.coef) + change, 0.0), MAX_ENTROPY_COEF)
        updated["measured_entropy"] = entropy
    return updated


def should_early_stop(kl: float, limits: EarlyStopConfig) -> bool:
    """Return whether the KL from the old policy is above the limit, so that the step's other updates are skipped."""
    return limits.max_kl is not None and not abs(kl) <= limits.max_kl  # `not <=`: NaN stops, too


SUPERVISED_SUMS = ("loss", "entropy", "tokens")  # of a micro-batch: share of the loss; sums over its tokens with a loss


def token_mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the micro-batch's share of the update's loss, in nats, and SUPERVISED_SUMS [3] in float64.

    `logprobs`, `entropy`: [T], of the next tokens. `batch.loss_weights` contain the denominator: the number of tokens
    with a loss in the whole update, on all ranks.
    """
    batch = batch.to(logprobs.device)
    learned = batch.mask.bool()  # logprobs that are masked out may be infinite
    loss = -(logprobs.where(learned, 0.0) * batch.loss_weights).sum()
    sums = torch.stack([loss.detach(), entropy.detach().where(learned, 0.0).sum().double(), learned.sum().double()])
    return loss.to(logprobs.dtype), sums


def merge_sums(reports: Sequence[Tensor]) -> Tensor:
    """Add the SUPERVISED_SUMS of micro-batches, float64 on the CPU."""
    return (
        torch.stack(list(reports)).sum(0).cpu() if reports else torch.zeros(len(SUPERVISED_SUMS), dtype=torch.float64)
    )


def supervised_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of an update from its reduced SUPERVISED_SUMS."""
    return {"sft/loss": sums["loss"], "train/entropy": sums["entropy"] / max(sums["tokens"], 1.0)}
