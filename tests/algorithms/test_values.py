"""Generalized advantages and the value loss against their formulas, written out token by token in float64."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.algorithms.values import (
    LOSS_SUMS,
    RETURN_SUMS,
    advantages_and_returns,
    generalized_advantages,
    make_value_loss,
    return_sums,
    value_metrics,
)
from grpo_mp.utils.types import MicroBatch

TOKENS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=40)
DISCOUNTS = st.sampled_from([1.0, 0.99, 0.9, 0.5])
LAMBDAS = st.sampled_from([1.0, 0.95, 0.3, 0.0])


def advantages(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    found: list[float] = generalized_advantages(torch.tensor(rewards), torch.tensor(values), gamma, lam).tolist()
    return found


@given(TOKENS, DISCOUNTS, LAMBDAS)
def test_advantages_are_the_sums_of_equation_16(tokens: list[tuple[float, float]], gamma: float, lam: float) -> None:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al., 2016)."""
    rewards = [float(np.float32(r)) for r, _ in tokens]
    values = [float(np.float32(v)) for _, v in tokens]
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=False)]
    expected = [
        sum((gamma * lam) ** (end - t) * deltas[end] for end in range(t, len(deltas))) for t in range(len(deltas))
    ]
    assert advantages(rewards, values, gamma, lam) == pytest.approx(expected, abs=1e-11)


@given(TOKENS.filter(bool), DISCOUNTS)
def test_a_length_adaptive_lambda_leaves_the_returns_at_lambda_1(
    tokens: list[tuple[float, float]], gamma: float
) -> None:
    """lambda = 1 - 1 / (0.05 T) of VAPO for the advantages, 0 for short answers; returns are discounted rewards."""
    rewards, values = ([float(np.float32(pair[k])) for pair in tokens] for k in (0, 1))
    lam = max(0.0, 1 - 20 / len(tokens))
    found, returns = advantages_and_returns(torch.tensor(rewards), torch.tensor(values), gamma, "length_adaptive")
    assert found.tolist() == pytest.approx(advantages(rewards, values, gamma, lam), abs=1e-11)
    count = len(tokens)
    expected = [sum(gamma ** (end - t) * rewards[end] for end in range(t, count)) for t in range(count)]
    assert returns.tolist() == pytest.approx(expected, abs=1e-10)


def batch_of(mask: list[float], weights: list[float], old: list[float], returns: list[float]) -> MicroBatch:
    count = len(mask)
    zeros = torch.zeros(count, dtype=torch.int64)
    return MicroBatch(
        *(zeros, torch.arange(count), zeros, torch.tensor(mask), (count,), zeros, (0,)),
        advantages=torch.zeros(count, dtype=torch.float64),
        loss_weights=torch.tensor(weights, dtype=torch.float64),
        rollout_logprobs=torch.zeros(count),
        values=torch.tensor(old),
        returns=torch.tensor(returns, dtype=torch.float64),
    )


def test_the_value_loss_is_the_larger_square_and_its_gradient_stops_at_the_clip() -> None:
    """Each token: 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); the derivative of the chosen one."""
    draw = random.Random(0)
    clip = 0.25
    count = 60
    new, old, returns = ([draw.uniform(-1, 1) for _ in range(count)] for _ in range(3))
    mask = [float(draw.random() < 0.7) for _ in range(count)]
    weights = [draw.random() * m for m in mask]
    new[mask.index(0.0)] = old[mask.index(0.0)] = float("inf")  # reaches nothing
    values = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss, sums = make_value_loss(clip)(values, batch_of(mask, weights, old, returns))
    loss.backward()
    expected_loss = 0.0
    clipped = 0
    gradient = []
    old = torch.tensor(old).double().tolist()  # as float32 has them
    for m, w, v, o, r in zip(mask, weights, new, old, returns, strict=True):
        near = min(max(v, o - clip), o + clip)
        takes_clipped = (near - r) ** 2 > (v - r) ** 2
        gradient.append(0.0 if not m or takes_clipped else w * (v - r))
        if m:
            expected_loss += 0.5 * w * max((v - r) ** 2, (near - r) ** 2)
            clipped += takes_clipped
    assert float(loss.detach()) == pytest.approx(expected_loss, abs=1e-12)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    assert dict(zip(LOSS_SUMS, sums.tolist(), strict=True)) == pytest.approx(
        {"value_loss": expected_loss, "vf_clipped": clipped, "tokens": sum(mask)}, abs=1e-12
    )
    assert 5 < clipped < 30


def test_metrics_are_those_of_numpy_over_response_tokens() -> None:
    draw = random.Random(1)
    values, returns = ([draw.uniform(-1, 1) for _ in range(30)] for _ in range(2))
    mask = [float(i % 3 > 0) for i in range(30)]
    halves = [batch_of(mask[a:b], mask[a:b], values[a:b], returns[a:b]) for a, b in ((0, 13), (13, 30))]
    sums = dict(zip(RETURN_SUMS, return_sums(halves).tolist(), strict=True))
    metrics = value_metrics({"value_loss": 0.75, "vf_clipped": 3.0, "tokens": 12.0}, sums)
    own = np.array(mask) > 0
    v = np.float64(np.float32(values))[own]
    r = np.array(returns)[own]
    assert metrics == pytest.approx(
        {
            "critic/value_loss": 0.75,
            "critic/vf_clipfrac": 0.25,
            "critic/value_mean": v.mean(),
            "critic/return_mean": r.mean(),
            "critic/explained_variance": 1 - (r - v).var() / r.var(),
        },
        abs=1e-12,
    )
    alike = value_metrics({"value_loss": 0.0, "vf_clipped": 0.0, "tokens": 0.0}, dict.fromkeys(RETURN_SUMS, 2.0))
    assert alike["critic/explained_variance"] == 0.0
