"""Corrections for the difference between rollout engine and policy, as factors of a token's loss; [T] -> [T]."""

import torch
from torch import Tensor

from grpo_mp.algorithms.sequences import Sequences
from grpo_mp.algorithms.settings import RolloutCorrectionConfig


def rollout_is_weights(
    old: Tensor, rollout: Tensor, sequences: Sequences, correction: RolloutCorrectionConfig
) -> Tensor:
    """Compute w = old / rollout of the token, or the product over the sequence, limited to [low, high].

    truncate: w is clamped (TIS, Yao et al. 2025). mask: outside w counts 0 (MIS, Liu et al. 2025; by token with
    [0.5, 5] it is IcePop, Ling team 2025). A token whose rollout logprob is not finite has w = 1.
    """
    if correction.kind == "none":
        return torch.ones_like(old)
    log_w = (old - rollout).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if correction.level == "sequence":
        log_w = sequences.sums(log_w)
    w = log_w.exp()
    if correction.kind == "truncate":
        return w.clamp(correction.low, correction.high)
    low, high = correction.low or 0.0, correction.high if correction.high is not None else torch.inf
    return w.where((w >= low) & (w <= high), 0.0)


def off_policy_mask(
    new: Tensor, rollout: Tensor, advantages: Tensor, sequences: Sequences, limit: float | None
) -> Tensor:
    """Return 0 for tokens of sequences with a negative advantage and a mean of rollout - new above the limit, else 1.

    Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
    """
    if limit is None:
        return torch.ones_like(new)
    drift = sequences.means((rollout - new.detach()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return ((advantages >= 0) | (drift <= limit)).double()
