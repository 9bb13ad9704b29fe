"""Adaptive loss coefficients, and early stopping of a step's updates. Pure."""

from collections.abc import Mapping

from grpo_mp.algorithms.losses import LossCoefficients
from grpo_mp.algorithms.settings import AlgorithmConfig, EarlyStopConfig

KL_GAIN = 0.1
MAX_KL_ERROR = 0.2

AdaptiveCoefs = Mapping[str, float]


def current_coefficients(adaptive_coefs: AdaptiveCoefs, algorithm: AlgorithmConfig) -> LossCoefficients:
    """Return the coefficients of the next update.

    With an entropy target the bonus acts only while the entropy is not above it, as in TRL.
    """
    entropy = adaptive_coefs.get("entropy", algorithm.entropy.coef)
    target = algorithm.entropy.target
    if target is not None and adaptive_coefs.get("measured_entropy", float("inf")) > target:
        entropy = 0.0
    return LossCoefficients(adaptive_coefs.get("kl", algorithm.kl.coef), entropy)


def update_adaptive_coefs(
    adaptive_coefs: AdaptiveCoefs, kl: float, entropy: float, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Return the adaptive coefficients after an update that measured a mean KL and a mean entropy, nats per token.

    KL: coef x (1 + 0.1 clip(kl / target - 1, -0.2, 0.2)) (Ziegler et al., arXiv 1909.08593, section 2.2).
    Entropy: up by `coef_step` at or below the target, down above it (Skywork-OR1, arXiv 2505.22312, section 4).
    """
    updated = dict(adaptive_coefs)
    if algorithm.kl.target is not None:
        error = min(max(kl / algorithm.kl.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
        updated["kl"] = adaptive_coefs.get("kl", algorithm.kl.coef) * (1 + KL_GAIN * error)
    bonus = algorithm.entropy
    if bonus.target is not None:
        change = bonus.coef_step if entropy <= bonus.target else -bonus.coef_step
        updated["entropy"] = min(max(adaptive_coefs.get("entropy", bonus.coef) + change, 0.0), bonus.max_coef)
        updated["measured_entropy"] = entropy
    return updated


def should_early_stop(kl: float, ess: float, limits: EarlyStopConfig) -> bool:
    """Return whether the policy is too far from the one that the step's samples count as drawn from."""
    too_far = limits.max_kl is not None and not abs(kl) <= limits.max_kl  # `not <=`: NaN has drifted as well
    too_few = limits.min_ess is not None and not ess >= limits.min_ess
    return too_far or too_few
