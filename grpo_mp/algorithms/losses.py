"""The loss function that the policy's backward runs on each micro-batch, put together from its parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_mp.algorithms.corrections import off_policy_mask, rollout_is_weights
from grpo_mp.algorithms.kl import ESTIMATORS
from grpo_mp.algorithms.policy_losses import POLICY_LOSSES, Terms
from grpo_mp.algorithms.report import loss_report
from grpo_mp.algorithms.sequences import Reduce, Sequences, alone
from grpo_mp.algorithms.settings import Algorithm
from grpo_mp.types import MicroBatch

LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
LARGEST_LOG_RATIO = 700.0  # e^709 is the end of float64


@dataclass(frozen=True)
class LossCoefficients:
    """Of the terms beside the surrogate, as their controllers have them now."""

    kl: float
    entropy: float

    @staticmethod
    def of(algorithm: Algorithm) -> "LossCoefficients":
        return LossCoefficients(algorithm.kl.weight, algorithm.entropy.weight)


def make_loss(algorithm: Algorithm, weights: LossCoefficients | None = None, reduce: Reduce = alone) -> LossFunction:
    """The loss of one micro-batch: its share of the update's loss, and sums for the metrics.

    `reduce` sums over the ranks that hold parts of the same sequences. Without `old_logprobs` this is the first
    update of a rollout: the old policy is the present one.
    """
    weights = weights or LossCoefficients.of(algorithm)
    kl_weight = weights.kl if algorithm.kl.place == "loss" else 0.0

    def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        batch = responses_only(batch.to(logprobs.device))
        new, entropy = at_responses(logprobs, batch.mask), at_responses(entropy, batch.mask)
        # A token whose engine logprob is no number does not learn.
        has_rollout_logprob = batch.rollout_logprobs.isfinite()
        terms = _terms(new, batch, algorithm, Sequences.of_batch(batch, reduce))
        decides = (entropy.detach() >= batch.entropy_floor) & has_rollout_logprob
        trusted = off_policy_mask(
            new, batch.rollout_logprobs, batch.advantages, terms.sequences, algorithm.correction.off_policy_limit
        )
        correction = terms.correction if algorithm.surrogate != "vespo" else 1.0
        surrogate = POLICY_LOSSES[algorithm.surrogate](terms, algorithm) * correction * trusted * decides
        kl = _kl(terms, batch, algorithm, algorithm.kl.level) * has_rollout_logprob
        policy_loss = (surrogate * batch.weights).sum()
        bonus = (entropy * decides * batch.mask).sum() * batch.entropy_weight
        kl_loss = kl_weight * (kl * batch.weights).sum() if kl_weight else 0.0  # a watched KL may be infinite
        total = policy_loss + kl_loss - weights.entropy * bonus
        of_tokens = _kl(terms, batch, algorithm, "token").detach() * has_rollout_logprob
        report = loss_report(batch, terms, entropy.detach(), of_tokens, trusted, algorithm)
        return total.to(logprobs.dtype), report | {"loss": total.detach(), "pg_loss": policy_loss.detach()}

    return loss


def _terms(new: Tensor, batch: MicroBatch, algorithm: Algorithm, sequences: Sequences) -> Terms:
    old = new.detach() if batch.old_logprobs is None else batch.old_logprobs
    rollout = batch.rollout_logprobs
    if algorithm.old_logprobs == "engine":
        old = rollout.where(rollout.isfinite(), new.detach())
    of_tokens = (new - old).clamp(max=LARGEST_LOG_RATIO)
    return Terms(
        new,
        of_tokens,
        RATIOS[algorithm.ratio](of_tokens, sequences).clamp(max=LARGEST_LOG_RATIO),
        batch.advantages,
        rollout_is_weights(old, rollout, sequences, algorithm.correction),
        sequences,
    )


def _token_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """r_t = pi / pi_old of the token (PPO; DeepSeekMath, eq. 3)."""
    return log_ratio


def _sequence_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """s = (pi / pi_old of the sequence)^(1 / tokens) (GSPO, arXiv 2507.18071, eq. 7)."""
    return sequences.means(log_ratio)


def _sequence_token_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """sg(s) pi / sg(pi): the sequence's value, the token's gradient (GSPO-token, eq. 14)."""
    return sequences.means(log_ratio.detach()) + log_ratio - log_ratio.detach()


def _product_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """pi / pi_old of the whole sequence (DeepSeek-R1, arXiv 2501.12948, eq. 1; RLOO, arXiv 2402.14740)."""
    return sequences.sums(log_ratio)


RATIOS: dict[str, Callable[[Tensor, Sequences], Tensor]] = {
    "token": _token_ratio,
    "sequence": _sequence_ratio,
    "sequence_token": _sequence_token_ratio,
    "product": _product_ratio,
}


def _kl(terms: Terms, batch: MicroBatch, algorithm: Algorithm, level: str) -> Tensor:
    """Estimate KL(policy || reference) -> [T]: of each token, or at every token that of its sequence (R1, eq. 2)."""
    if batch.reference_logprobs is None:
        return torch.zeros_like(terms.new)
    log_r = batch.reference_logprobs - terms.new
    if level == "sequence":
        log_r = terms.sequences.sums(log_r).clamp(max=LARGEST_LOG_RATIO)
    return ESTIMATORS[algorithm.kl.estimator](log_r, terms.log_ratio.exp())


def at_responses(values: Tensor, mask: Tensor) -> Tensor:
    """In float64, zero where the mask is: what stands at prompts and padding reaches neither loss nor gradient."""
    return values.double().where(mask.bool(), 0.0)


def responses_only(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with all its logprobs as `at_responses` makes them."""
    names = ("rollout_logprobs", "old_logprobs", "reference_logprobs")
    held = {name: values for name in names if (values := getattr(batch, name)) is not None}
    cleared: dict[str, Any] = {name: at_responses(values, batch.mask) for name, values in held.items()}
    return replace(batch, **cleared)
