"""A-priori bounds of the float32 rounding error of logprobs, entropies and their gradients.

Standard model of floating-point arithmetic (Higham, Accuracy and Stability of Numerical Algorithms, 2002, ch. 2-4):
every operation has relative error at most U, exp and log 2 U, and a sum of n terms, in any order, n U of the sum of
their absolute values. SECOND_ORDER covers the omitted terms of order U^2.
"""

import torch
from torch import Tensor

U = 2.0**-24
SECOND_ORDER = 1.01


def error_bounds(
    hidden: Tensor, weight: Tensor, cotangent: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds for the output [2, T] and for the gradients of hidden [T, H] and weight [V, H].

    hidden [T, H], weight [V, H] (without padding) and cotangent [2, T] in float64; targets [T].
    """
    tokens, width, vocabulary = len(hidden), hidden.shape[1], len(weight)
    logits = hidden @ weight.t() / temperature
    magnitudes = hidden.abs() @ weight.abs().t() / temperature
    # A dot product of `width` terms and a division; counted again for the maximum logit.
    d_logit = (width + 1) * U * magnitudes.amax(1, keepdim=True)
    log_p = logits.log_softmax(1)
    p, entropy = log_p.exp(), -(log_p.exp() * log_p).sum(1, keepdim=True)
    shifted = logits - logits.amax(1, keepdim=True)
    log_sum = -log_p.amax(1, keepdim=True)
    d_shifted = 2 * d_logit + U * shifted.abs()
    d_weight = d_shifted.amax(1, keepdim=True) + 2 * U  # relative, of exp(shifted)
    d_log_sum = d_weight + vocabulary * U + 2 * U * log_sum
    d_log_p = d_shifted + d_log_sum + U * (shifted.abs() + log_p.abs())
    # entropy = log_sum - sum(exp(shifted) * shifted) / sum(exp(shifted)), where the quotient is log_sum - entropy.
    quotient = (p * shifted.abs()).sum(1, keepdim=True)
    d_quotient = quotient * (2 * d_weight + (2 * vocabulary + 2) * U) + (p * d_shifted).sum(1, keepdim=True)
    d_entropy = d_log_sum + d_quotient + U * entropy
    picked = torch.zeros_like(logits).scatter(1, targets[:, None], 1.0)
    output = torch.stack([(picked * d_log_p).sum(1), d_entropy[:, 0]])
    # d logit = onehot * g0 - p * (g0 + g1 * (log_p + entropy)), divided by the temperature.
    g0, g1 = (row.abs()[:, None] for row in cotangent)
    slope = g0 + g1 * (log_p + entropy).abs()
    d_slope = g1 * (d_log_p + d_entropy + 2 * U * (log_p + entropy).abs()) + U * slope
    magnitude = (p * slope + g0 * picked) / temperature
    d_magnitude = (p * (d_slope + slope * (d_log_p + 4 * U)) + 2 * U * g0 * picked) / temperature + 2 * U * magnitude
    grad_hidden = d_magnitude @ weight.abs() + vocabulary * U * (magnitude @ weight.abs())
    grad_weight = d_magnitude.t() @ hidden.abs() + (tokens + 1) * U * (magnitude.t() @ hidden.abs())
    return SECOND_ORDER * output, SECOND_ORDER * grad_hidden, SECOND_ORDER * grad_weight
