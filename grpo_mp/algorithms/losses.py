"""Per-token losses, and the loss function that the policy's backward runs on each micro-batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_mp.algorithms.report import loss_report
from grpo_mp.config import Algorithm
from grpo_mp.types import MicroBatch

LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token (PPO, eq. 7); [T] -> [T]."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(policy || reference) per token: r - log r - 1, r = ref / policy.

    DeepSeekMath, eq. 4; [T] -> [T].
    """
    log_ratio = reference - logprobs
    return log_ratio.exp() - log_ratio - 1


def make_loss(algorithm: Algorithm) -> LossFunction:
    """The loss of one micro-batch: its share of the update's loss, and sums for the metrics.

    Without `old_logprobs` this is the first update of a rollout: the old policy is the present one.
    """

    def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        batch = responses_only(batch.to(logprobs.device))
        new = at_responses(logprobs, batch.mask)
        log_ratio = new - (new.detach() if batch.old_logprobs is None else batch.old_logprobs)
        surrogate = clipped_surrogate(log_ratio.exp(), batch.advantages, algorithm.clip.low, algorithm.clip.high)
        kl = torch.zeros_like(surrogate)
        if batch.reference_logprobs is not None:
            kl = k3(new, batch.reference_logprobs)
        policy_loss = (surrogate * batch.weights).sum()
        total = policy_loss + algorithm.kl.weight * (kl * batch.weights).sum()
        entropy = at_responses(entropy.detach(), batch.mask)
        report = loss_report(batch, new.detach(), entropy, log_ratio.detach(), kl.detach(), algorithm.clip)
        return total.to(logprobs.dtype), report | {"loss": total.detach(), "pg_loss": policy_loss.detach()}

    return loss


def at_responses(values: Tensor, mask: Tensor) -> Tensor:
    """In float64, zero where the mask is: what stands at prompts and padding reaches neither loss nor gradient."""
    return values.double().where(mask.bool(), 0.0)


def responses_only(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with all its logprobs as `at_responses` makes them."""
    names = ("rollout_logprobs", "old_logprobs", "reference_logprobs")
    held = {name: values for name in names if (values := getattr(batch, name)) is not None}
    cleared: dict[str, Any] = {name: at_responses(values, batch.mask) for name, values in held.items()}
    return replace(batch, **cleared)
