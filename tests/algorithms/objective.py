"""Every objective of the family written out sample by sample in float64, as the papers have it; and as micro-batches.

Nothing here is packed, masked or weighted per token: a sequence ratio is one number of its sample, an aggregation is
its own sum. Gradients are autograd's of these sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_mp.algorithms.advantages import EPS, outcome_advantages
from grpo_mp.algorithms.losses import (
    CONTROL_TOKEN_WEIGHT,
    LossCoefficients,
    MicroBatchLoss,
    load_policy_loss,
    make_loss,
    token_weights,
)
from grpo_mp.algorithms.policy_losses import PolicyLoss, Reduce
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.microbatches import plan_microbatches
from grpo_mp.batching.packing import pack
from grpo_mp.utils.types import MicroBatch, Sample, SampleInfo

Values = NDArray[np.float32]
# LIMIT: max_response_tokens
PROMPT_TOKENS = 3
LIMIT = 50


@dataclass(frozen=True)
class UpdateData:
    """An update: of each sample its group and reward, and of each of its response tokens four logprobs."""

    groups: Sequence[int]
    rewards: Sequence[float]
    logprobs: Sequence[Values]
    rollout: Sequence[Values]
    old: Sequence[Values] | None
    reference: Sequence[Values] | None

    @property
    def lengths(self) -> list[int]:
        return [len(values) for values in self.logprobs]


def draw_update(
    lengths: Sequence[int],
    groups: Sequence[int],
    seed: int,
    log_ratio_std: float = 0.3,
    first_update: bool = False,
    kl: bool = True,
    rollout_std: float = 0.01,
) -> UpdateData:
    """Draw an update at random.

    `log_ratio_std`: standard deviation of log-ratios to old policy and reference; `rollout_std`: to the engine.
    """
    generator = np.random.default_rng(seed)

    def near(center: Sequence[Values], std: float) -> list[Values]:
        return [(values - std * generator.standard_normal(values.shape)).astype(np.float32) for values in center]

    logprobs = [-generator.exponential(2.0, n).astype(np.float32) for n in lengths]
    return UpdateData(
        groups=groups,
        rewards=generator.choice([0.0, 0.5, 1.5], len(lengths)).tolist(),
        logprobs=logprobs,
        rollout=near(logprobs, rollout_std),
        old=None if first_update else near(logprobs, log_ratio_std),
        reference=near(logprobs, log_ratio_std) if kl else None,
    )


@dataclass(frozen=True)
class Objective:
    """Loss and its gradient by sample. `scale`: sum of the sizes of the loss's terms, which rounding is measured by."""

    loss: float
    scale: float
    gradients: list[Tensor]


def objective(update: UpdateData, algorithm: AlgorithmConfig, advantages: Sequence[float] | None = None) -> Objective:
    """Compute the loss of the update: minus the paper's objective."""
    advantages = advantages or [_advantage(update, i, algorithm) for i in range(len(update.lengths))]
    leaves = [torch.from_numpy(values).double().requires_grad_() for values in update.logprobs]
    terms = [_sample_terms(update, i, leaf, advantages[i], algorithm) for i, leaf in enumerate(leaves)]
    losses = [_aggregate(term, update.lengths, algorithm) for term in terms]
    loss = torch.stack(losses).sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    scale = sum(float(_aggregate(term.detach().abs(), update.lengths, algorithm)) for term in terms)
    return Objective(loss.item(), scale, list(gradients))


def _sample_terms(update: UpdateData, i: int, new: Tensor, advantage: float, algorithm: AlgorithmConfig) -> Tensor:
    """[tokens]: what each token adds to the loss before it is aggregated."""
    rollout = torch.from_numpy(update.rollout[i]).double()
    old = new.detach() if update.old is None else torch.from_numpy(update.old[i]).double()
    if algorithm.old_logprobs == "engine":
        old = rollout
    correction = _correction(old, rollout, algorithm)
    policy_loss = _policy_loss(new, old, correction, advantage, algorithm, positive=positive(update, i))
    if algorithm.policy_loss == "gmpo":  # one weight: the geometric mean over the tokens that are not masked
        kept = correction > 0
        policy_loss = policy_loss * kept * correction[kept].log().mean().exp() if kept.any() else policy_loss * 0
    elif algorithm.policy_loss != "vespo":
        policy_loss = policy_loss * correction
    drift = (new.detach() if algorithm.old_logprobs == "engine" else old) - rollout
    policy_loss = policy_loss * _passes(drift, algorithm)
    limit = algorithm.rollout_correction.off_policy_mask_threshold
    if limit is not None and advantage < 0 and float((rollout - new.detach()).mean()) > limit:
        policy_loss = policy_loss * 0
    if update.reference is None or algorithm.kl.apply_to == "reward":
        return policy_loss
    x = torch.from_numpy(update.reference[i]).double() - new
    if algorithm.kl.level == "sequence":
        x = x.sum() * torch.ones_like(new)
    ratio = _ratio(new, old, algorithm)
    kl = {
        "k2": 0.5 * x**2,
        "k3": x.exp() - x - 1,
        "k3_clamped": torch.clamp(x.exp() - x - 1, max=10.0),
        "k3_unbiased": ratio * (x.exp() - x - 1),
    }[algorithm.kl.estimator]
    return policy_loss + algorithm.kl.coef * kl


def _policy_loss(
    new: Tensor, old: Tensor, correction: Tensor, advantage: float, algorithm: AlgorithmConfig, positive: float
) -> Tensor:
    low = 1 - algorithm.clip.low
    high = 1 + algorithm.clip.high
    ratio = _ratio(new, old, algorithm)
    if algorithm.policy_loss == "clip":
        bounded = ratio if algorithm.clip.dual_clip is None else torch.clamp(ratio, max=algorithm.clip.dual_clip)
        return -torch.min(bounded * advantage, torch.clamp(ratio, low, high) * advantage)
    if algorithm.policy_loss == "cispo":
        return -torch.clamp(ratio.detach(), low, high) * advantage * new
    if algorithm.policy_loss == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if algorithm.policy_loss == "gmpo":
        sign = 1.0 if advantage > 0 else -1.0
        bounds = torch.clamp(ratio, max(low, 1e-300), high)
        smaller = torch.min(ratio**sign, bounds**sign) ** sign
        return -(smaller.log().mean().exp()) * advantage * torch.ones_like(new)
    if algorithm.policy_loss == "clip_cov":
        smaller = torch.min(ratio * advantage, torch.clamp(ratio, low, high) * advantage)
        return -torch.where(torch.from_numpy(high_covariance(len(new))), 0.0, smaller)
    if algorithm.policy_loss == "kl_cov":
        return -ratio * advantage + (new - old).abs() * torch.from_numpy(high_covariance(len(new)))
    if algorithm.policy_loss == "clip_positive":
        return -torch.min(ratio * advantage, torch.clamp(ratio, low, high) * advantage) - 0.1 * positive * new
    if algorithm.policy_loss.startswith("dppo"):
        p = new.detach().exp()
        q = old.exp()
        if algorithm.policy_loss == "dppo_tv":
            inside = p - q <= algorithm.clip.high if advantage > 0 else q - p <= algorithm.clip.low
        else:  # verl's 1e-8
            kl = q * torch.log(q / p) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
            inside = (kl <= algorithm.clip.high) | (p <= q) if advantage > 0 else (kl <= algorithm.clip.low) | (p >= q)
        return -ratio.detach().clamp(max=algorithm.clip.dual_clip or math.inf) * advantage * new * inside
    if algorithm.policy_loss == "vespo":
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        log_w = torch.clamp((new - old).detach(), -20, 20).sum()
        log_w = log_w + torch.clamp(torch.log(correction), math.log(1e-8), 20).sum()
        w = torch.clamp(log_w, math.log(1e-8), 20).exp()
        return -(w**k * torch.exp(rate * (1 - w))) * advantage * new
    return -ratio * advantage


def positive(update: UpdateData, sample: int) -> float:
    """Return tokens of the update / tokens of right answers for a right answer, else 0. The best reward is right."""
    right = [n for n, reward in zip(update.lengths, update.rewards, strict=True) if reward == 1.5]
    return sum(update.lengths) / sum(right) if update.rewards[sample] == 1.5 else 0.0


def high_covariance(tokens: int) -> NDArray[np.bool_]:
    """Return a mask of the tokens of a sample that the tests give to Clip-Cov and KL-Cov as selected."""
    return np.arange(tokens) % 3 == 1


def _ratio(new: Tensor, old: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """[tokens]: whose gradients go where the ratio's definition says."""
    if algorithm.ratio == "token":
        return (new - old).exp()
    if algorithm.ratio == "product":
        return (new.sum() - old.sum()).exp() * torch.ones_like(new)
    sequence = (new - old).mean().exp()
    return (
        sequence * torch.ones_like(new) if algorithm.ratio == "sequence" else sequence.detach() * _straight_through(new)
    )


def _straight_through(new: Tensor) -> Tensor:
    """1 in value, the token's own ratio in gradient."""
    return new.exp() / new.detach().exp()


def _correction(old: Tensor, rollout: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    settings = algorithm.rollout_correction
    w = (old - rollout).exp() if settings.level == "token" else (old - rollout).sum().exp() * torch.ones_like(old)
    low = 0.0 if settings.low is None else settings.low
    high = math.inf if settings.high is None else settings.high
    if settings.kind == "truncate":
        return torch.clamp(w, low, high)
    if settings.kind == "mask":
        return torch.where((w < low) | (w > high), 0.0, w)
    return torch.ones_like(w)


def _passes(drift: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """[tokens]: 1 inside every mask. `drift`: policy - engine, in nats."""
    x = drift.clamp(-20, 20)
    passes = torch.ones_like(x)
    for name, (low, high) in algorithm.rollout_correction.masks.items():
        value = {"k1": torch.exp(-x), "k2": x**2 / 2, "k3": torch.exp(x) - x - 1}[name[-2:]]
        if name.startswith("seq_sum"):
            value = torch.exp(-x.sum()) if name.endswith("k1") else value.sum()
        elif name.startswith("seq_mean"):
            value = torch.exp(-x.mean()) if name.endswith("k1") else value.mean()
        elif name.startswith("seq_max"):
            value = value.max()
        passes = passes * (low <= value) * (value <= high)
    return passes


def _aggregate(terms: Tensor, lengths: Sequence[int], algorithm: AlgorithmConfig) -> Tensor:
    if algorithm.aggregation == "token_mean":
        return terms.sum() / sum(lengths)
    if algorithm.aggregation == "constant":
        return terms.sum() / LIMIT / len(lengths)
    if algorithm.aggregation == "sequence_sum":
        return terms.sum() / len(lengths)
    if algorithm.aggregation == "decoupled":
        rest = terms[1:].mean() if len(terms) > 1 else torch.zeros((), dtype=terms.dtype)
        return (CONTROL_TOKEN_WEIGHT * terms[0] + rest) / len(lengths)
    return terms.mean() / len(lengths)


def _advantage(update: UpdateData, sample: int, algorithm: AlgorithmConfig) -> float:
    settings = algorithm.advantage
    reward = update.rewards[sample]
    rewards = np.array(update.rewards)
    group = rewards[np.array(update.groups) == update.groups[sample]]
    subtracts = settings.baseline not in ("none", "critic", "optimal_token")  # these are subtracted later
    compares = subtracts or settings.baseline == "optimal_token"
    if not subtracts:
        centered = reward
    elif settings.baseline == "leave_one_out":
        centered = reward - (group.sum() - reward) / (len(group) - 1) if len(group) > 1 else 0.0
    else:
        centered = reward - group.mean()
    if compares and group.min() == group.max():
        return 0.0
    if settings.scale == "group_mean":
        return float(centered / (group.mean() + EPS))
    std = {"none": None, "group_std": group, "batch_std": rewards}[settings.scale]
    return float(centered if std is None else centered / (std.std(ddof=1) + EPS))


def loss_of(
    algorithm: AlgorithmConfig,
    coefficients: LossCoefficients | None = None,
    reduce: Reduce = lambda values: values,
    policy_loss: PolicyLoss | None = None,
) -> MicroBatchLoss:
    """Return the loss with the coefficients and the policy loss of the settings; sequences are whole."""
    coefficients = coefficients or LossCoefficients(algorithm.kl.coef, algorithm.entropy.coef)
    return make_loss(algorithm, coefficients, reduce, policy_loss or load_policy_loss(algorithm))


def sample_infos(
    ids: Sequence[int],
    parts: Sequence[dict[str, float]] | None = None,
    rewards: Sequence[float] | None = None,
    steps: Sequence[tuple[tuple[int, float], ...]] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[SampleInfo]:
    count = len(ids)
    rows = zip(
        ids, lengths or [5] * count, rewards or [0.0] * count, parts or [{}] * count, steps or [()] * count, strict=True
    )
    return [
        SampleInfo(group, i, 3, length, reward, False, 0, reward_terms, step_rewards)
        for i, (group, length, reward, reward_terms, step_rewards) in enumerate(rows)
    ]


def to_microbatches(
    update: UpdateData, algorithm: AlgorithmConfig, max_tokens: int, advantages: Sequence[float] | None = None
) -> tuple[list[MicroBatch], list[torch.Tensor]]:
    """Packed micro-batches of at most `max_tokens`, and the present logprobs [T] of each."""
    samples = [_sample(values) for values in update.rollout]
    advantages = advantages or outcome_advantages(update.rewards, update.groups, algorithm.advantage)
    weights = token_weights(update.lengths, [True] * len(samples), algorithm, LIMIT)
    plans = plan_microbatches([sample.total_tokens for sample in samples], 1, max_tokens, align=4).ranks[0]
    batches = [pack(samples, advantages, weights, plan, align=4) for plan in plans]
    with_logprobs = [
        replace(
            batch,
            old_logprobs=_pack(update.old, batch, 0.0),
            reference_logprobs=_pack(update.reference, batch, 0.0),
            positive=_pack([np.full_like(v, positive(update, i)) for i, v in enumerate(update.rollout)], batch, 0.0),
            high_covariance=_pack([high_covariance(n).astype(np.float32) for n in update.lengths], batch, 0.0).bool(),
        )
        for batch in batches
    ]
    logprobs = [_pack(update.logprobs, batch, -1.0) for batch in batches]
    return with_logprobs, [values for values in logprobs if values is not None]


def _pack(values: Sequence[Values] | None, batch: MicroBatch, fill: float) -> torch.Tensor | None:
    if values is None:
        return None
    packed = scatter_responses([torch.from_numpy(values[i]) for i in batch.sample_ids], batch)
    return packed.where(batch.mask.bool(), fill)


def _sample(rollout: Values) -> Sample:
    tokens = tuple(range(len(rollout)))
    return Sample(0, 0, (1,) * PROMPT_TOKENS, tokens, tuple(rollout.tolist()), (0,) * len(tokens), truncated=False)


def scatter_responses(values: Sequence[Tensor], batch: MicroBatch) -> Tensor:
    """Scatter [response tokens] for each of `sample_ids` into [T], zero elsewhere."""
    scattered = torch.zeros_like(batch.mask)
    if batch.sample_ids:
        scattered[batch.mask.bool()] = torch.cat(list(values)).to(scattered)
    return scattered
