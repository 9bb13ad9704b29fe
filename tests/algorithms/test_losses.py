"""The loss and its gradient against the whole GRPO objective written out in float64, in `objective.py`."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mp.algorithms.losses import clipped_surrogate, k3, make_loss
from grpo_mp.config import Algorithm
from grpo_mp.data.pack import gather_responses
from grpo_mp.types import MicroBatch
from tests.algorithms.objective import Drawn, as_microbatches, draw, write_out

WHOLE = 10_000  # tokens: everything in one micro-batch
LENGTHS = (1, 9, 2, 30, 17, 4, 4, 1)
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one token": ((1,), (0,)),
    "one group": ((5, 1, 12), (3, 3, 3)),
    "uneven groups, mixed": (LENGTHS, (0, 1, 0, 2, 1, 0, 3, 0)),
    "no group has a second sample": (LENGTHS, tuple(range(8))),
}
ALGORITHMS = [
    {"kl": {"weight": weight}, "aggregation": aggregation, "clip": {"low": 0.2, "high": high}}
    for weight, aggregation, high in (
        (0.0, "sequence_mean", 0.2),
        (0.04, "token_mean", 0.28),
        (2.0, "sequence_mean", 0.2),
    )
]


def run(algorithm: Algorithm, batches: list[MicroBatch], logprobs: list[Tensor]) -> tuple[float, list[Tensor], Any]:
    """Loss summed over micro-batches, gradient [T] of each, and the reports."""
    loss = make_loss(algorithm)
    total, gradients, reports = 0.0, [], []
    for batch, values in zip(batches, logprobs, strict=True):
        leaf = values.clone().requires_grad_()
        value, report = loss(leaf, torch.ones_like(leaf), batch)
        gradients += torch.autograd.grad(value, leaf)
        total += value.item()
        reports.append(report)
    return total, gradients, reports


def check(drawn: Drawn, algorithm: Algorithm, max_tokens: int) -> None:
    batches, logprobs = as_microbatches(drawn, algorithm, max_tokens)
    total, gradients, _ = run(algorithm, batches, logprobs)
    expected = write_out(drawn, algorithm)
    assert abs(total - expected.loss) <= 1e-6 * expected.scale
    found: dict[int, Tensor] = {}
    for batch, gradient in zip(batches, gradients, strict=True):
        assert torch.equal(gradient[batch.mask == 0], torch.zeros(int((batch.mask == 0).sum())))
        found |= zip(batch.sample_ids, gather_responses(gradient, batch), strict=True)
    for i, (values, scale) in enumerate(zip(expected.gradients, expected.gradient_scales, strict=True)):
        assert (np.abs(found[i].numpy() - values) <= 1e-6 * scale).all()


@pytest.mark.parametrize("settings", ALGORITHMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart", [1e-4, 0.3, 15.0])
def test_equal_to_the_objective(shape: str, apart: float, settings: dict[str, Any]) -> None:
    lengths, groups = SHAPES[shape]
    algorithm = Algorithm.model_validate(settings)
    for seed, first in enumerate((False, False, True)):
        drawn = draw(lengths, groups, seed, apart, first, kl=algorithm.kl.weight > 0)
        check(drawn, algorithm, WHOLE)


@pytest.mark.parametrize("max_tokens", [4, 24, 40])
@pytest.mark.parametrize("settings", ALGORITHMS)
def test_micro_batches_sum_to_the_same(max_tokens: int, settings: dict[str, Any]) -> None:
    algorithm = Algorithm.model_validate(settings)
    drawn = draw(LENGTHS, (0, 0, 0, 0, 1, 1, 1, 1), seed=5, apart=0.3, first=False, kl=True)
    check(drawn, algorithm, max_tokens)


def test_log_ratios_of_eighty_either_way() -> None:
    algorithm = Algorithm.model_validate({"kl": {"weight": 0.1}})
    drawn = draw((4, 4), (0, 0), seed=1, apart=0.1, first=False, kl=True)
    far = [np.array([80, -80, 60, -60], np.float32), np.array([-80, 80, 3, -3], np.float32)]
    moved = [values - by for values, by in zip(drawn.logprobs, far, strict=True)]
    check(replace(drawn, rewards=[0.0, 1.0], old=moved), algorithm, WHOLE)
    check(replace(drawn, rewards=[1.0, 0.0], old=moved, reference=moved), algorithm, WHOLE)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("first", [True, False])
def test_nothing_at_prompts_and_padding_reaches_anything(garbage: float, first: bool) -> None:
    algorithm = Algorithm.model_validate({"kl": {"weight": 0.04}})
    drawn = draw(LENGTHS, (0, 0, 0, 0, 1, 1, 1, 1), seed=2, apart=0.3, first=first, kl=True)
    (batch,), (logprobs,) = as_microbatches(drawn, algorithm, WHOLE)

    def spoil(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.where(batch.mask.bool(), garbage)

    spoilt = replace(
        batch,
        old_logprobs=spoil(batch.old_logprobs),
        reference_logprobs=spoil(batch.reference_logprobs),
        rollout_logprobs=spoil(batch.rollout_logprobs),
    )
    clean = run(algorithm, [batch], [logprobs])
    dirty = run(algorithm, [spoilt], [spoil(logprobs)])
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1][0], clean[1][0])
    entropy = torch.full_like(logprobs, garbage).where(~batch.mask.bool(), 1.0)
    _, report = make_loss(algorithm)(spoil(logprobs), entropy, spoilt)
    assert report == clean[2][0]


def test_a_micro_batch_without_a_response_token_costs_nothing() -> None:
    algorithm = Algorithm.model_validate({"kl": {"weight": 1.0}})
    drawn = draw((3,), (0,), seed=0, apart=1.0, first=False, kl=True)
    (batch,), (logprobs,) = as_microbatches(drawn, algorithm, WHOLE)
    none = {name: torch.zeros_like(batch.mask) for name in ("mask", "weights", "advantages")}
    loss, (gradient,), _ = run(algorithm, [replace(batch, **none)], [logprobs * torch.nan])
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_surrogate_by_hand() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.1, 1.1, 2.0, 2.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    assert clipped_surrogate(ratio, advantage, 0.2, 0.3).tolist() == pytest.approx([-0.5, 0.8, -1.1, 1.1, -1.3, 2.0])


def test_k3_is_positive_and_its_mean_is_the_divergence() -> None:
    torch.manual_seed(0)
    policy, reference = (torch.randn(50, dtype=torch.float64).log_softmax(0) for _ in range(2))
    values = k3(policy, reference)
    assert bool((values > 0).all())
    assert torch.equal(k3(policy, policy), torch.zeros_like(policy))
    expected = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    torch.testing.assert_close((policy.exp() * values).sum(), expected)
