"""The loss function that the policy's backward runs on each micro-batch: policy loss, corrections, KL and entropy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_mp.algorithms.corrections import off_policy_mask, rollout_is_weights
from grpo_mp.algorithms.kl import ESTIMATORS
from grpo_mp.algorithms.policy_losses import PolicyLoss, TokenTerms
from grpo_mp.algorithms.registries import POLICY_LOSSES, policy_loss_entry
from grpo_mp.algorithms.report import loss_report
from grpo_mp.algorithms.sequences import Reduce, Sequences, no_reduction
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.errors import UserError
from grpo_mp.types import MicroBatch

LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
MAX_LOG_RATIO = 700.0  # exp(709) is the largest float64


@dataclass(frozen=True)
class LossCoefficients:
    """Coefficients of the terms beside the policy loss, as their controllers have set them."""

    kl: float
    entropy: float


def make_loss(
    algorithm: AlgorithmConfig,
    coefficients: LossCoefficients | None = None,
    reduce: Reduce = no_reduction,
    policy_loss: PolicyLoss | None = None,
) -> LossFunction:
    """Return the loss of one micro-batch: its share of the update's loss, and sums for the metrics.

    `reduce` sums over the ranks that hold parts of the same sequences. Without `old_logprobs` this is the first
    update of a rollout: the old policy is the present one. `coefficients` and `policy_loss`: None takes those of the
    settings.
    """
    coefficients = coefficients or LossCoefficients(algorithm.kl.coef, algorithm.entropy.coef)
    policy_loss = policy_loss or load_policy_loss(algorithm)
    kl_coefficient = coefficients.kl if algorithm.kl.apply_to == "loss" else 0.0

    def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        batch = _mask_logprobs(batch.to(logprobs.device))
        new, entropy = _masked(logprobs, batch.mask), _masked(entropy, batch.mask)
        has_rollout_logprob = batch.rollout_logprobs.isfinite()  # the other tokens do not learn
        terms = _token_terms(new, batch, algorithm, Sequences.from_batch(batch, reduce))
        entropy_mask = (entropy.detach() >= batch.entropy_floor) & has_rollout_logprob
        on_policy = off_policy_mask(
            new,
            batch.rollout_logprobs,
            batch.advantages,
            terms.sequences,
            algorithm.rollout_correction.off_policy_mask_threshold,
        )
        token_losses = _token_losses(policy_loss, terms, algorithm) * on_policy * entropy_mask
        weighted_policy_loss = (token_losses * batch.weights).sum()
        kl = _kl(terms, batch, algorithm, algorithm.kl.level) * has_rollout_logprob
        kl_loss = kl_coefficient * (kl * batch.weights).sum() if kl_coefficient else 0.0  # 0 x inf would be NaN
        entropy_bonus = (entropy * entropy_mask * batch.mask).sum() * batch.entropy_weight
        total = weighted_policy_loss + kl_loss - coefficients.entropy * entropy_bonus
        token_kl = _kl(terms, batch, algorithm, "token").detach() * has_rollout_logprob
        report = loss_report(batch, terms, entropy.detach(), token_kl, on_policy, algorithm)
        return total.to(logprobs.dtype), report | {"loss": total.detach(), "pg_loss": weighted_policy_loss.detach()}

    return loss


def load_policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the policy loss that the settings name. Raises UserError where a user's own cannot be loaded."""
    return POLICY_LOSSES.resolve(algorithm.policy_loss, "algorithm.policy_loss", algorithm.policy_loss_args)


def _token_losses(policy_loss: PolicyLoss, terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Return the policy loss of tokens [T], corrected for the rollout engine. Raises UserError for another shape."""
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
        RATIOS[algorithm.ratio](token_log_ratio, sequences).clamp(max=MAX_LOG_RATIO),
        batch.advantages,
        rollout_is_weights(old, rollout, sequences, algorithm.rollout_correction),
        sequences,
    )


def _token_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """Return log r, [T] -> [T], with r = pi / pi_old of the token (PPO; DeepSeekMath, eq. 3)."""
    return log_ratio


def _sequence_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """Return log s, [T] -> [T], with s = (pi / pi_old of the sequence)^(1 / tokens) (GSPO, arXiv 2507.18071, eq. 7)."""
    return sequences.means(log_ratio)


def _sequence_token_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """Return log(sg(s) pi / sg(pi)), [T] -> [T]: the sequence's value, the token's gradient (GSPO-token, eq. 14)."""
    return sequences.means(log_ratio.detach()) + log_ratio - log_ratio.detach()


def _product_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """Return log(pi / pi_old) of the sequence, [T] -> [T] (R1, arXiv 2501.12948, eq. 1; RLOO, arXiv 2402.14740)."""
    return sequences.sums(log_ratio)


RATIOS: dict[str, Callable[[Tensor, Sequences], Tensor]] = {
    "token": _token_ratio,
    "sequence": _sequence_ratio,
    "sequence_token": _sequence_token_ratio,
    "product": _product_ratio,
}


def _kl(terms: TokenTerms, batch: MicroBatch, algorithm: AlgorithmConfig, level: str) -> Tensor:
    """Estimate KL(policy || reference) -> [T]: of each token, or at every token that of its sequence (R1, eq. 2)."""
    if batch.reference_logprobs is None:
        return torch.zeros_like(terms.new)
    log_r = batch.reference_logprobs - terms.new
    if level == "sequence":
        log_r = terms.sequences.sums(log_r).clamp(max=MAX_LOG_RATIO)
    return ESTIMATORS[algorithm.kl.estimator](log_r, terms.log_ratio.exp())


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return float64 values, 0 at prompts and padding: what is there reaches neither loss nor gradient."""
    return values.double().where(mask.bool(), 0.0)


def _mask_logprobs(batch: MicroBatch) -> MicroBatch:
    names = ("rollout_logprobs", "old_logprobs", "reference_logprobs")
    logprobs = {name: values for name in names if (values := getattr(batch, name)) is not None}
    masked: dict[str, Any] = {name: _masked(values, batch.mask) for name, values in logprobs.items()}
    return replace(batch, **masked)
