"""Estimates of KL(policy || reference) per token, from log r = reference - logprob; [T] -> [T].

k1, k2, k3: Schulman, Approximating KL divergence (2020), with r = reference / policy.
"""

from collections.abc import Callable

from torch import Tensor

CLAMP = 10.0


def k1(log_r: Tensor, ratio: Tensor) -> Tensor:
    """Return -log r: unbiased, may be negative."""
    return -log_r


def k2(log_r: Tensor, ratio: Tensor) -> Tensor:
    """Return log^2 r / 2: biased in value; its gradient is that of the KL divergence on policy."""
    return log_r.square() / 2


def k3(log_r: Tensor, ratio: Tensor) -> Tensor:
    """Return r - 1 - log r: unbiased and never negative (DeepSeekMath, eq. 4)."""
    return log_r.exp() - 1 - log_r


def k3_clamped(log_r: Tensor, ratio: Tensor) -> Tensor:
    """Return k3 clamped to [-10, 10]: one token cannot dominate."""
    return k3(log_r, ratio).clamp(-CLAMP, CLAMP)


def k3_unbiased(log_r: Tensor, ratio: Tensor) -> Tensor:
    """Return k3 x importance ratio, gradient included: unbiased off policy (DeepSeek-V3.2, arXiv 2512.02556)."""
    return k3(log_r, ratio) * ratio


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_clamped": k3_clamped,
    "k3_unbiased": k3_unbiased,
}
