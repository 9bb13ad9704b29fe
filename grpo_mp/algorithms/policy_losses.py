"""Policy losses of a response token before it is weighted: one function per published loss, [T] -> [T]."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_mp.algorithms.sequences import Sequences
from grpo_mp.algorithms.settings import AlgorithmConfig


@dataclass(frozen=True)
class TokenTerms:
    """What a policy loss is made of: of every token, [T] in float64. `new` and both log ratios carry the gradient."""

    new: Tensor  # logprob
    token_log_ratio: Tensor  # new - old
    log_ratio: Tensor  # at the level that `algorithm.ratio` names
    advantages: Tensor
    correction: Tensor  # importance weights old / rollout, limited
    sequences: Sequences


class PolicyLoss(Protocol):
    """Returns the loss of every token, [T] in float64, not yet weighted: minus what the token's objective adds.

    `algorithm` is that section of the settings; `algorithm.policy_loss_args` come by name. The result is multiplied by
    each token's correction for the rollout engine, unless the registry says that the loss applies it, and by the
    weights of `algorithm.aggregation`; KL and entropy are added.
    Prompts and padding have values too, which do not count.
    """

    def __call__(self, terms: TokenTerms, algorithm: AlgorithmConfig, /) -> Tensor:
        """Return the loss of each token, [T]."""


def ppo_clip(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -min(r A, clip(r, 1 - low, 1 + high) A), [T] -> [T] (PPO, eq. 7; separate bounds: DAPO, eq. 8).

    With `dual_clip` the unclipped r is at most that (two-sided clipping, INTELLECT-2, arXiv 2505.07291; for A < 0 the
    dual clip of Ye et al., arXiv 1912.09729).
    """
    ratio, clip, advantages = terms.log_ratio.exp(), algorithm.clip, terms.advantages
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    if clip.dual_clip is not None:
        ratio = ratio.clamp(max=clip.dual_clip)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -sg(clip(r, 1 - low, 1 + high)) A log pi, [T] -> [T]: no token loses its gradient (MiniMax-M1, eq. 4)."""
    weight = terms.log_ratio.detach().exp().clamp(1 - algorithm.clip.low, 1 + algorithm.clip.high)
    return -weight * terms.advantages * terms.new


def sapo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -sigmoid(tau (r - 1)) 4 / tau A, [T] -> [T], tau by the sign of A (SAPO, arXiv 2511.20347)."""
    positive, negative = algorithm.sapo.temperature_positive, algorithm.sapo.temperature_negative
    tau = torch.where(terms.advantages > 0, positive, negative).double()
    return -torch.sigmoid(tau * (terms.log_ratio.exp() - 1)) * 4 / tau * terms.advantages


def gmpo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -A x geometric mean over the sequence of the ratios, [T] -> [T]; each is clipped on its bad side.

    GMPO, eq. 4. The corrections for the engine are ratios, too: their geometric mean over the tokens that they do not
    mask multiplies the sequence, as in verl.
    """
    low = torch.tensor(1 - algorithm.clip.low, dtype=torch.float64).clamp(min=1e-300).log()
    high = torch.tensor(1 + algorithm.clip.high, dtype=torch.float64).log()
    log_ratio = terms.token_log_ratio
    clipped = torch.where(terms.advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    kept = (terms.correction > 0).double()
    log_correction = terms.correction.where(terms.correction > 0, 1.0).log()
    weight = (terms.sequences.sums(log_correction) / terms.sequences.sums(kept).clamp(min=1)).exp() * kept
    return -terms.sequences.means(clipped).exp() * terms.advantages * weight


def vespo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -phi(w) A log pi, [T] -> [T], phi(w) = w^k e^(lambda (1 - w)), w the ratio of the full sequence.

    VESPO, arXiv 2602.10693. As in TRL w is clamped to [1e-8, e^20], and the correction for the engine is part of it
    (registries.py).
    """
    gamma, low, high = algorithm.vespo, torch.tensor(1e-8).log().item(), 20.0
    log_correction = terms.correction.log().clamp(low, high)
    log_ratio = terms.token_log_ratio.detach().clamp(-high, high)
    log_w = terms.sequences.sums(log_ratio) + terms.sequences.sums(log_correction)
    log_w = log_w.clamp(low, high)
    positive = terms.advantages >= 0
    k = torch.where(positive, gamma.k_positive, gamma.k_negative)
    lam = torch.where(positive, gamma.lambda_positive, gamma.lambda_negative)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    return -phi * terms.advantages * terms.new


def policy_gradient(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -r A, [T] -> [T], without a clip."""
    return -terms.log_ratio.exp() * terms.advantages
