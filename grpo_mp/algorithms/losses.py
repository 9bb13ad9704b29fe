"""Per-token losses, and the loss function that the policy's backward runs on each micro-batch."""

from collections.abc import Callable

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
        batch = batch.to(logprobs.device)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        # Padding has no meaningful logprobs: keep it out of exp, where an overflow would poison the sum.
        log_ratio = (logprobs - old).where(batch.mask.bool(), 0.0)
        ratio = log_ratio.exp()
        surrogate = clipped_surrogate(ratio, batch.advantages, algorithm.clip.low, algorithm.clip.high)
        kl = torch.zeros_like(surrogate)
        if batch.reference_logprobs is not None:
            kl = k3(logprobs, batch.reference_logprobs.where(batch.mask.bool(), logprobs.detach()))
        policy_loss = (surrogate * batch.weights).sum()
        total = policy_loss + algorithm.kl.weight * (kl * batch.weights).sum()
        report = loss_report(batch, logprobs.detach(), entropy.detach(), ratio.detach(), kl.detach(), algorithm.clip)
        return total, report | {"loss": total.detach().double(), "pg_loss": policy_loss.detach().double()}

    return loss
