"""What a response token adds to the loss, before it is weighted: one function per published surrogate."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mp.algorithms.sequences import Sequences
from grpo_mp.algorithms.settings import Algorithm


@dataclass(frozen=True)
class Terms:
    """Of every token, [T] in float64. `new` and both log ratios carry the gradient."""

    new: Tensor  # logprob
    token_log_ratio: Tensor  # new - old
    log_ratio: Tensor  # what `algorithm.ratio` makes of it
    advantages: Tensor
    correction: Tensor  # old / rollout, limited
    sequences: Sequences


def clip(terms: Terms, wanted: Algorithm) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, eq. 7; separate bounds: DAPO, eq. 8).

    With `dual` the unclipped r is at most that (two-sided clipping, INTELLECT-2, arXiv 2505.07291; for A < 0 the
    dual clip of Ye et al., arXiv 1912.09729).
    """
    ratio, bounds, advantages = terms.log_ratio.exp(), wanted.clip, terms.advantages
    clipped = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    if bounds.dual is not None:
        ratio = ratio.clamp(max=bounds.dual)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(terms: Terms, wanted: Algorithm) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: no token loses its gradient (MiniMax-M1, eq. 4)."""
    weight = terms.log_ratio.detach().exp().clamp(1 - wanted.clip.low, 1 + wanted.clip.high)
    return -weight * terms.advantages * terms.new


def sapo(terms: Terms, wanted: Algorithm) -> Tensor:
    """-sigmoid(tau (r - 1)) 4 / tau A, tau by the sign of A (SAPO, arXiv 2511.20347)."""
    positive, negative = wanted.gate.positive, wanted.gate.negative
    tau = torch.where(terms.advantages > 0, positive, negative).double()
    return -torch.sigmoid(tau * (terms.log_ratio.exp() - 1)) * 4 / tau * terms.advantages


def gmpo(terms: Terms, wanted: Algorithm) -> Tensor:
    """-A times the geometric mean over the sequence of the ratios, each clipped on its bad side (GMPO, eq. 4)."""
    low = torch.tensor(1 - wanted.clip.low, dtype=torch.float64).clamp(min=1e-300).log()
    high = torch.tensor(1 + wanted.clip.high, dtype=torch.float64).log()
    of_tokens = terms.token_log_ratio
    bounded = torch.where(terms.advantages > 0, of_tokens.clamp(max=high), of_tokens.clamp(min=low))
    return -terms.sequences.means(bounded).exp() * terms.advantages


def vespo(terms: Terms, wanted: Algorithm) -> Tensor:
    """-phi(w) A log pi, phi(w) = w^k e^(lambda (1 - w)), w the ratio of whole sequences (VESPO, arXiv 2602.10693).

    As in TRL w is held in [1e-8, e^20], and the correction for the engine is part of it.
    """
    gamma, smallest, largest = wanted.gamma, torch.tensor(1e-8).log().item(), 20.0
    correction = terms.correction.log().clamp(smallest, largest)
    ratios = terms.token_log_ratio.detach().clamp(-largest, largest)
    log_w = terms.sequences.sums(ratios) + terms.sequences.sums(correction)
    log_w = log_w.clamp(smallest, largest)
    rises = terms.advantages >= 0
    k = torch.where(rises, gamma.k_positive, gamma.k_negative)
    slope = torch.where(rises, gamma.lambda_positive, gamma.lambda_negative)
    phi = (slope + k * log_w - slope * log_w.exp()).exp()
    return -phi * terms.advantages * terms.new


def unclipped(terms: Terms, wanted: Algorithm) -> Tensor:
    """-r A: the policy gradient."""
    return -terms.log_ratio.exp() * terms.advantages


POLICY_LOSSES: dict[str, Callable[[Terms, Algorithm], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "none": unclipped,
}
