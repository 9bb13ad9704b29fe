"""PPO's critic: generalized advantage estimation and the clipped value loss, in float64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from grpo_mp.utils.types import MicroBatch

ValueLoss = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor]]
ALPHA = 0.05  # of VAPO's length-adaptive lambda
LOSS_SUMS = ("value_loss", "vf_clipped", "tokens")  # of a micro-batch: share of the loss; counts of tokens
RETURN_SUMS = ("tokens", "values", "returns", "returns2", "errors", "errors2")  # over tokens with a loss; error: R - V


def discounted_sums(values: Tensor, discount: float) -> Tensor:
    """Return at each t the sum over l of discount^l x values[t + l], [T] -> [T], by log2(T) tensor operations."""
    sums = values.clone()
    step = 1
    while step < len(sums):  # each sum has `step` terms now
        ahead = torch.zeros_like(sums)
        ahead[:-step] = sums[step:]
        sums = sums + discount**step * ahead
        step = 2 * step
    return sums


def generalized_advantages(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantage of each token of one response, [T], by generalized advantage estimation.

    A_t = sum over l of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t), with V = 0 after the
    last token (Schulman et al., arXiv 1506.02438, eq. 11, 12 and 16). `values` [T]: V of the state before each token.
    """
    rewards = rewards.double()
    values = values.double()
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    return discounted_sums(rewards + gamma * following - values, gamma * lam)


def advantages_and_returns(
    rewards: Tensor, values: Tensor, gamma: float, lam: float | Literal["length_adaptive"]
) -> tuple[Tensor, Tensor]:
    """Return the advantages and the critic's returns of one response, [T] each.

    Returns are advantages + values. With a length-adaptive lambda, advantages have lambda = 1 - 1 / (ALPHA T), at least
    0, and returns have lambda 1 (VAPO, arXiv 2504.05118, section 4.1; decoupled GAE: VC-PPO, arXiv 2503.01491).
    """
    if lam != "length_adaptive":
        advantages = generalized_advantages(rewards, values, gamma, lam)
        return advantages, advantages + values.double()
    adaptive = max(0.0, 1 - 1 / (ALPHA * max(1, len(values))))
    returns = generalized_advantages(rewards, values, gamma, 1.0) + values.double()
    return generalized_advantages(rewards, values, gamma, adaptive), returns


def make_value_loss(cliprange_value: float) -> ValueLoss:
    """Return the function of a micro-batch's values [T] that returns its share of the update's loss, and LOSS_SUMS [3].

    Loss of a token: max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, with c = `cliprange_value` (PPO as in
    OpenAI's baselines; TRL cliprange_value, verl critic.cliprange_value). Tokens have the weights of the policy loss.
    """

    def loss(values: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        batch = batch.to(values.device)
        if batch.values is None or batch.returns is None:
            raise ValueError("the micro-batch has no values of the old critic: compute them before the update")
        learned = batch.in_loss
        # Values at other tokens affect neither loss nor gradient.
        new, old, returns = (one.double().where(learned, 0.0) for one in (values, batch.values, batch.returns))
        clipped = new.clamp(old - cliprange_value, old + cliprange_value)
        squared = (new - returns).square()
        squared_clipped = (clipped - returns).square()
        total = (0.5 * torch.max(squared, squared_clipped) * batch.loss_weights).sum()
        is_clipped = (squared_clipped > squared).detach() & learned
        sums = torch.stack([total.detach(), is_clipped.sum().double(), learned.sum().double()])
        return total.to(values.dtype), sums

    return loss


def return_sums(batches: Sequence[MicroBatch]) -> Tensor:
    """Return RETURN_SUMS [6] over the micro-batches that have values and returns, float64 on the CPU."""
    sums = torch.zeros(len(RETURN_SUMS), dtype=torch.float64)
    for batch in batches:
        if batch.values is not None and batch.returns is not None:
            learned = batch.in_loss
            values = batch.values[learned].double()
            returns = batch.returns[learned].double()
            errors = returns - values
            rows = (torch.ones_like(values), values, returns, returns.square(), errors, errors.square())
            sums += torch.stack([row.sum() for row in rows]).cpu()
    return sums


def value_metrics(losses: Mapping[str, float], sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the critic's metrics of a step. `losses`: LOSS_SUMS, mean over updates; `sums`: RETURN_SUMS of the job.

    The explained variance is 1 - Var(R - V) / Var(R); 0 if all returns are equal.
    """
    count = max(sums["tokens"], 1.0)
    variance = sums["returns2"] / count - (sums["returns"] / count) ** 2
    unexplained = sums["errors2"] / count - (sums["errors"] / count) ** 2
    return {
        "critic/value_loss": losses["value_loss"],
        "critic/vf_clipfrac": losses["vf_clipped"] / max(losses["tokens"], 1.0),
        "critic/value_mean": sums["values"] / count,
        "critic/return_mean": sums["returns"] / count,
        "critic/explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0,
    }
