"""How far float32 may take logprobs, entropies and their gradients from their values: an a-priori error bound.

Standard model of floating-point arithmetic (Higham, Accuracy and Stability of Numerical Algorithms, 2002, ch. 2-4):
every operation rounds by at most U of its result, exp and log by 2 U, and a sum of n terms by n U of the sum of their
sizes, in any order. Terms of order U^2 are left out, which SECOND_ORDER makes room for.
"""

import torch
from torch import Tensor

U = 2.0**-24
SECOND_ORDER = 1.01


def bounds(
    hidden: Tensor, weight: Tensor, cotangent: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest errors of the output [2, T], and of the gradients of hidden [T, H] and weight [V, H].

    hidden [T, H], weight [V, H] (without padding) and cotangent [2, T] in float64; targets [T].
    """
    tokens, width, vocabulary = len(hidden), hidden.shape[1], len(weight)
    logits = hidden @ weight.t() / temperature
    sizes = hidden.abs() @ weight.abs().t() / temperature
    # A dot product of `width` terms and a division; the same error again by way of the largest logit.
    logit = (width + 1) * U * sizes.amax(1, keepdim=True)
    log_p = logits.log_softmax(1)
    p, entropy = log_p.exp(), -(log_p.exp() * log_p).sum(1, keepdim=True)
    below = logits - logits.amax(1, keepdim=True)
    log_sum = -log_p.amax(1, keepdim=True)
    d_below = 2 * logit + U * below.abs()
    d_weight = d_below.amax(1, keepdim=True) + 2 * U  # relative, of exp(below)
    d_log_sum = d_weight + vocabulary * U + 2 * U * log_sum
    d_log_p = d_below + d_log_sum + U * (below.abs() + log_p.abs())
    # entropy = log_sum - sum(exp(below) * below) / sum(exp(below)); the quotient's size is entropy - log_sum.
    quotient = (p * below.abs()).sum(1, keepdim=True)
    d_quotient = quotient * (2 * d_weight + (2 * vocabulary + 2) * U) + (p * d_below).sum(1, keepdim=True)
    d_entropy = d_log_sum + d_quotient + U * entropy
    picked = torch.zeros_like(logits).scatter(1, targets[:, None], 1.0)
    output = torch.stack([(picked * d_log_p).sum(1), d_entropy[:, 0]])
    # d logit = onehot * g0 - p * (g0 + g1 * (log_p + entropy)), divided by the temperature.
    g0, g1 = (row.abs()[:, None] for row in cotangent)
    slope = g0 + g1 * (log_p + entropy).abs()
    d_slope = g1 * (d_log_p + d_entropy + 2 * U * (log_p + entropy).abs()) + U * slope
    size = (p * slope + g0 * picked) / temperature
    d_size = (p * (d_slope + slope * (d_log_p + 4 * U)) + 2 * U * g0 * picked) / temperature + 2 * U * size
    of_hidden = d_size @ weight.abs() + vocabulary * U * (size @ weight.abs())
    of_weight = d_size.t() @ hidden.abs() + (tokens + 1) * U * (size.t() @ hidden.abs())
    return SECOND_ORDER * output, SECOND_ORDER * of_hidden, SECOND_ORDER * of_weight
