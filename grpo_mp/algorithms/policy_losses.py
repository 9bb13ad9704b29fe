"""Policy losses of response tokens before weighting: one function per published loss, [T] -> [T]."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.utils.types import MicroBatch

# Published constants: for a positive advantage, for a negative one.
SAPO_TEMPERATURES = (1.0, 1.05)
VESPO_K = (2.0, 3.0)
VESPO_LAMBDA = (3.0, 2.0)
# Clip-Cov and KL-Cov, with verl's defaults: share of the tokens that are selected, limits of Clip-Cov's covariance,
# weight of KL-Cov's penalty.
COV_SHARE = 2e-4
COV_BOUNDS = (1.0, 5.0)
COV_KL = 1.0
POSITIVE_WEIGHT = 0.1  # of the negative log likelihood of right answers, in VAPO
EPS = 1e-8
Reduce = Callable[[Tensor], Tensor]  # sums a tensor over the ranks that hold parts of the same sequences


@dataclass(frozen=True)
class Sequences:
    """Maps the response tokens of a micro-batch to their sequences."""

    index: Tensor  # int64 [T], sequence of each token; 0 for padding, where the mask is 0
    mask: Tensor  # float64 [T]
    count: int
    reduce: Reduce

    @staticmethod
    def from_batch(batch: MicroBatch, reduce: Reduce) -> "Sequences":
        """Select the response tokens with a finite rollout logprob; other tokens belong to no sequence."""
        mask = batch.mask.double() * batch.rollout_logprobs.isfinite()
        return Sequences(batch.sequence_index.clamp(min=0), mask, max(1, len(batch.sample_ids)), reduce)

    def sums(self, values: Tensor) -> Tensor:
        """Return at each token the sum of the values over its sequence, [T] -> [T].

        The gradient flows to all tokens of the sequence, on every rank that holds some of them.
        """
        summed: Tensor = _SequenceSum.apply(values, self)
        return summed

    def means(self, values: Tensor) -> Tensor:
        """Return at each token the mean of the values over its sequence, [T] -> [T]."""
        return self.sums(values) / self.sums(torch.ones_like(self.mask)).clamp(min=1)

    def _sum_and_broadcast(self, values: Tensor) -> Tensor:
        zeros = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        masked = values.where(self.mask.bool(), 0.0)
        return self.reduce(zeros.index_add(0, self.index, masked.double()))[self.index]


class _SequenceSum(torch.autograd.Function):
    """y_t = sum of x_u over the sequence of t, with gradient dL/dx_u = sum of dL/dy_t over the same tokens."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return sequences._sum_and_broadcast(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sequences: Sequences = ctx.sequences
        return sequences._sum_and_broadcast(gradients[0]) * sequences.mask, None


@dataclass(frozen=True)
class TokenTerms:
    """Inputs of a policy loss, float64 [T] each. `new` and both log ratios carry the gradient."""

    new: Tensor  # logprobs of the current policy
    token_log_ratio: Tensor  # new - old
    log_ratio: Tensor  # at the level that `algorithm.ratio` names
    advantages: Tensor
    correction: Tensor  # rollout correction: importance weights old / rollout, limited
    sequences: Sequences
    high_covariance: Tensor | None = None  # bool: the tokens that Clip-Cov or KL-Cov selects; None: another loss
    positive: Tensor | None = None  # see MicroBatch


class PolicyLoss(Protocol):
    """Computes the loss of each token before weighting, float64 [T].

    `algorithm`: that section of the settings. The caller multiplies the result by the rollout correction, unless the
    registry says that the loss applies it, and by the weights of `algorithm.aggregation`, and adds KL and entropy.
    Values at prompts and padding are ignored.
    """

    def __call__(self, terms: TokenTerms, algorithm: AlgorithmConfig, /) -> Tensor:
        """Return the loss of each token, [T]."""


def ppo_clip(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -min(r A, clip(r, 1 - low, 1 + high) A), [T] -> [T] (PPO, eq. 7; separate bounds: DAPO, eq. 8).

    `dual_clip` limits the r of the first term from above (two-sided clipping, INTELLECT-2, arXiv 2505.07291; for A < 0
    the dual clip of Ye et al., arXiv 1912.09729).
    """
    ratio = terms.log_ratio.exp()
    clip = algorithm.clip
    advantages = terms.advantages
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    if clip.dual_clip is not None:
        ratio = ratio.clamp(max=clip.dual_clip)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -sg(clip(r, 1 - low, 1 + high)) A log pi, [T] -> [T], with sg = stop-gradient (MiniMax-M1, eq. 4).

    Every token keeps its gradient.
    """
    weight = terms.log_ratio.detach().exp().clamp(1 - algorithm.clip.low, 1 + algorithm.clip.high)
    return -weight * terms.advantages * terms.new


def sapo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -sigmoid(tau (r - 1)) 4 / tau A, [T] -> [T], with tau by the sign of A (SAPO, arXiv 2511.20347)."""
    tau = torch.where(terms.advantages > 0, *SAPO_TEMPERATURES).double()
    return -torch.sigmoid(tau * (terms.log_ratio.exp() - 1)) * 4 / tau * terms.advantages


def gmpo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -A x geometric mean of the sequence's clipped token ratios, [T] -> [T] (GMPO, eq. 4).

    Ratios are clipped only from above for A > 0, and only from below otherwise. As in verl, a sequence is also
    multiplied by the geometric mean of its rollout corrections, over the tokens that these do not mask.
    """
    # A clip.low of 1 or more means no lower bound; its log would be infinite or NaN.
    low = torch.tensor(1 - algorithm.clip.low, dtype=torch.float64).clamp(min=1e-300).log()
    high = torch.tensor(1 + algorithm.clip.high, dtype=torch.float64).log()
    log_ratio = terms.token_log_ratio
    clipped = torch.where(terms.advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    kept = (terms.correction > 0).double()
    log_correction = terms.correction.where(terms.correction > 0, 1.0).log()
    weight = (terms.sequences.sums(log_correction) / terms.sequences.sums(kept).clamp(min=1)).exp() * kept
    return -terms.sequences.means(clipped).exp() * terms.advantages * weight


def vespo(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -phi(w) A log pi, [T] -> [T], with phi(w) = w^k e^(lambda (1 - w)) and w the ratio of the whole sequence.

    VESPO, arXiv 2602.10693. As in TRL, w is clamped to [1e-8, e^20] and includes the rollout correction
    (registries.py).
    """
    low = torch.tensor(1e-8).log().item()
    high = 20.0
    log_correction = terms.correction.log().clamp(low, high)
    log_ratio = terms.token_log_ratio.detach().clamp(-high, high)
    log_w = terms.sequences.sums(log_ratio) + terms.sequences.sums(log_correction)
    log_w = log_w.clamp(low, high)
    positive = terms.advantages >= 0
    k = torch.where(positive, *VESPO_K)
    lam = torch.where(positive, *VESPO_LAMBDA)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    return -phi * terms.advantages * terms.new


def within_divergence(terms: TokenTerms, algorithm: AlgorithmConfig, kind: Literal["tv", "kl"]) -> Tensor:
    """Return whether a token is inside DPPO's trust region, bool [T] (arXiv 2602.04879, binary divergences).

    The two outcomes are: the sampled token, of probability p now and q in the old policy, or any other token. A token
    leaves the region if its gradient would move it further: p - q > high for A > 0, q - p > low otherwise (tv), or
    KL(q || p) above the limit and p on that side of q (kl). `clip.low` and `clip.high` are the limits. As in verl, EPS
    is added to both probabilities of the other tokens.
    """
    log_p = terms.new.detach()
    log_q = log_p - terms.token_log_ratio.detach()
    p = log_p.exp()
    q = log_q.exp()
    clip = algorithm.clip
    is_positive = terms.advantages > 0
    if kind == "tv":
        return torch.where(is_positive, p - q <= clip.high, p - q >= -clip.low)
    kl = q * (log_q - log_p) + (1 - q) * ((1 - q + EPS) / (1 - p + EPS)).log()
    return torch.where(is_positive, (kl <= clip.high) | (p <= q), (kl <= clip.low) | (p >= q))


def dppo_tv(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -sg(r) A log pi inside the trust region of total variation, else 0, [T] -> [T] (DPPO, arXiv 2602.04879).

    `clip.dual_clip` limits r from above.
    """
    return _inside_trust_region(terms, algorithm, "tv")


def dppo_kl(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute `dppo_tv` with the KL divergence of the old policy from the policy as the limit, [T] -> [T]."""
    return _inside_trust_region(terms, algorithm, "kl")


def _inside_trust_region(terms: TokenTerms, algorithm: AlgorithmConfig, kind: Literal["tv", "kl"]) -> Tensor:
    limit = algorithm.clip.dual_clip if algorithm.clip.dual_clip is not None else torch.inf
    ratio = terms.log_ratio.detach().exp().clamp(max=limit)
    return -ratio * terms.advantages * terms.new * within_divergence(terms, algorithm, kind)


@dataclass(frozen=True)
class CovarianceLimits:
    """Tokens of an update with a high covariance c = (A - mean of A) (log pi_old - mean of log pi_old).

    Cui et al., The entropy mechanism, arXiv 2505.22617. The means are over the tokens of the update. Clip-Cov
    (`random`) takes COV_SHARE of the tokens at random where c is within COV_BOUNDS, KL-Cov (`largest`) those with the
    largest c; at least one token. Ties at the limit are all taken.
    """

    kind: Literal["random", "largest"]
    mean_advantage: float
    mean_logprob: float
    limit: float  # largest number drawn, or least covariance, of the selected tokens

    @staticmethod
    def of(
        kind: Literal["random", "largest"], advantages: Tensor, logprobs: Tensor, draws: Tensor
    ) -> "CovarianceLimits":
        """Compute the limits from the N tokens of an update, float64 [N] each. `draws`: one random number a token."""
        mean_advantage = float(advantages.mean())
        mean_logprob = float(logprobs.mean())
        c = (advantages - mean_advantage) * (logprobs - mean_logprob)
        count = max(1, int(COV_SHARE * len(c)))
        if kind == "largest":
            return CovarianceLimits(kind, mean_advantage, mean_logprob, limit=float(c.topk(count).values[-1]))
        eligible = draws[(c > COV_BOUNDS[0]) & (c < COV_BOUNDS[1])].sort().values
        limit = float(eligible[:count][-1]) if len(eligible) else -1.0
        return CovarianceLimits(kind, mean_advantage, mean_logprob, limit)

    def select(self, advantages: Tensor, logprobs: Tensor, draws: Tensor) -> Tensor:
        """Return a mask of the selected tokens, bool [T]. Arguments: float64 [T]."""
        c = (advantages - self.mean_advantage) * (logprobs - self.mean_logprob)
        if self.kind == "largest":
            return c >= self.limit
        return (c > COV_BOUNDS[0]) & (c < COV_BOUNDS[1]) & (draws <= self.limit)


def token_draws(batch: MicroBatch) -> Tensor:
    """Return a pseudo-random number in [0, 1) for each token, float64 [T].

    The number is a hash of the sample id and the token's position, so that it does not depend on the layout.
    """
    ids = torch.tensor([*batch.sample_ids, 0])[batch.sequence_index.clamp(min=0)]
    state = ids * 0x9E3779B1 + batch.positions * 0x85EBCA77
    for factor in (0x2C1B3C6D, 0x297A2D39):  # of a 32-bit hash; products stay below 2^63
        state = ((state ^ (state >> 15)) & 0xFFFFFFFF) * factor & 0xFFFFFFFF
    return (state ^ (state >> 15)).double() / 2**32


def clip_cov(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute `ppo_clip`, with a loss of 0 for the tokens that CovarianceLimits selects at random, [T] -> [T].

    arXiv 2505.22617. The tokens are selected once for an update, from the old policy's logprobs.
    """
    assert terms.high_covariance is not None
    return ppo_clip(terms, algorithm).where(~terms.high_covariance, 0.0)


def kl_cov(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -r A, plus COV_KL |log r| for tokens of the largest covariance, [T] -> [T].

    arXiv 2505.22617; |log r| as in the published code. The tokens are selected as in `clip_cov`.
    """
    assert terms.high_covariance is not None
    penalty = COV_KL * terms.log_ratio.abs()
    return policy_gradient(terms, algorithm) + penalty.where(terms.high_covariance, 0.0)


def clip_positive(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute `ppo_clip`, plus POSITIVE_WEIGHT times -log pi for tokens of right answers, [T] -> [T].

    `terms.positive` makes the second part a mean over the tokens of the update's right answers: positive-example loss
    (VAPO, arXiv 2504.05118, section 4.3).
    """
    assert terms.positive is not None
    return ppo_clip(terms, algorithm) - POSITIVE_WEIGHT * terms.positive * terms.new


def policy_gradient(terms: TokenTerms, algorithm: AlgorithmConfig) -> Tensor:
    """Compute -r A, [T] -> [T], without a clip."""
    return -terms.log_ratio.exp() * terms.advantages


LEAST_REST = 1e-7  # smallest probability of other tokens: less is rounding error of float32 logprobs


@dataclass(frozen=True)
class TopkTerms:
    """Top-k distillation of each token, float64 [T]: divergence with gradient, and probability of the k tokens."""

    divergence: Tensor
    teacher_mass: Tensor
    policy_mass: Tensor


def topk_terms(batch: MicroBatch, distillation: DistillationConfig) -> TopkTerms | None:
    """Compute the divergence of policy and teacher at each token, from their logprobs of the teacher's top k tokens.

    Both distributions are over k + 1 buckets: the teacher's k most likely tokens, and all other tokens together.
    Merging tokens cannot increase a divergence (data processing inequality: Cover and Thomas, Elements of Information
    Theory, 2006, section 2.8; log sum inequality, theorem 2.7.1), so the result is at most the divergence over the
    whole vocabulary. It is 0 if the buckets agree, and no probability is renormalized. With p the policy and q the
    teacher:

    reverse: sum p log(p / q), forward: sum q log(q / p), mixed: their mean (NeMo-RL kl_type).
    None if no teacher scored the micro-batch.
    """
    ids = batch.teacher_topk_ids
    teacher = batch.teacher_topk_logprobs
    policy = batch.topk_logprobs
    if ids is None or teacher is None or policy is None:
        return None
    known = ids >= 0
    learned = batch.mask.bool()[:, None]
    log_p = policy.t().double().where(learned, 0.0)
    mass = teacher.double().exp().where(known, 0.0).sum(1)
    rest = torch.log1p(-mass.clamp(max=1 - LEAST_REST))
    log_q = torch.cat([teacher.double(), rest[:, None]], 1)
    difference = (log_p - log_q).where(torch.cat([known, torch.ones_like(known[:, :1])], 1) & learned, 0.0)
    reverse = (log_p.exp() * difference).sum(1)
    forward = -(log_q.exp() * difference).sum(1)
    weight = {"reverse": 0.0, "forward": 1.0, "mixed": 0.5}[distillation.kl_type]
    policy_mass = log_p.detach()[:, :-1].exp().where(known, 0.0).sum(1)
    return TopkTerms(weight * forward + (1 - weight) * reverse, mass, policy_mass)
