"""Every loss of the family and its gradient against the paper's objective, written out in float64 in `objective.py`.

The weights of tokens under each aggregation, and controllers of coefficients and of an early stop.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_mp.algorithms.losses import (
    current_coefficients,
    estimate_kl,
    should_early_stop,
    token_weights,
    update_adaptive_coefs,
)
from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.algorithms.settings import AlgorithmConfig, EarlyStopConfig, KLConfig
from grpo_mp.batching.packing import gather_responses
from grpo_mp.utils.types import MicroBatch
from tests.algorithms.objective import UpdateData, draw_update, loss_of, objective, to_microbatches

ONE_MICROBATCH = 10_000  # tokens: more than any update here has
LENGTHS = (1, 9, 2, 30, 17, 4, 4, 1)
PAIRS = (0, 0, 0, 0, 1, 1, 1, 1)
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one group": ((5, 1, 12), (3, 3, 3)),
    "uneven groups, mixed": (LENGTHS, (0, 1, 0, 2, 1, 0, 3, 0)),
    "no group has a second sample": (LENGTHS, tuple(range(8))),
}
PARTS: dict[str, dict[str, Any]] = {
    "clip higher, token mean": {"clip": {"high": 0.28}, "aggregation": "token_mean", "kl": {"coef": 0.04}},
    "dual_clip clip": {"clip": {"dual_clip": 3.0}},
    "batch std": {"advantage": {"scale": "batch_std"}},
    "k2": {"kl": {"coef": 0.1, "estimator": "k2"}},
    "k3 clamped": {"kl": {"coef": 0.1, "estimator": "k3_clamped"}},
    "k3 unbiased": {"kl": {"coef": 0.1, "estimator": "k3_unbiased"}},
    "old logprobs of the engine": {"old_logprobs": "engine"},
    "TIS with a floor": {"rollout_correction": {"kind": "truncate", "low": 0.5, "high": 2.0}},
    "sequence TIS": {"rollout_correction": {"kind": "truncate", "level": "sequence", "high": 2.0}},
    "IcePop": {"rollout_correction": {"kind": "mask", "low": 0.5, "high": 5.0}},
    "gspo with sequence mask": {
        "ratio": "sequence",
        "rollout_correction": {"kind": "mask", "level": "sequence", "low": 0.2, "high": 3.0},
    },
    "vespo with TIS": {"policy_loss": "vespo", "rollout_correction": {"kind": "truncate", "high": 2.0}},
    "off-policy sequence mask": {"rollout_correction": {"off_policy_mask_threshold": 0.01}},
    "geometric mean mask with token TIS": {
        "rollout_correction": {"kind": "truncate", "high": 2.0, "masks": {"seq_mean_k1": [0.95, 1.06]}}
    },
    "masks of tokens and sequences": {
        "rollout_correction": {"masks": {"token_k1": 2.0, "token_k3": 0.2, "seq_sum_k2": 8.0, "seq_max_k3": 0.5}}
    },
    "trust region mask without old logprobs": {
        "old_logprobs": "engine",
        "rollout_correction": {"masks": {"seq_max_k2": 0.05, "seq_sum_k1": [0.1, 10.0]}},
    },
    "DPPO with limited ratios": {"policy_loss": "dppo_kl", "clip": {"low": 0.02, "high": 0.05, "dual_clip": 1.1}},
    "product ratio": {"ratio": "product", "clip": {"low": 0.9, "high": 10.0}},
    "gspo with a KL": {"ratio": "sequence", "kl": {"coef": 0.3, "estimator": "k3_unbiased"}},
    "gspo-token with a KL": {"ratio": "sequence_token", "kl": {"coef": 0.3, "estimator": "k3_unbiased"}},
    "gspo with token TIS": {"ratio": "sequence", "rollout_correction": {"kind": "truncate", "high": 2.0}},
    "R1's equations": {"ratio": "product", "kl": {"coef": 0.1, "level": "sequence"}},
    "cispo on sequences": {"policy_loss": "cispo", "ratio": "sequence", "clip": {"low": 1.0, "high": 4.0}},
    "gmpo with token TIS": {"policy_loss": "gmpo", "rollout_correction": {"kind": "truncate", "high": 1.2}},
    "gmpo with sequence TIS": {
        "policy_loss": "gmpo",
        "rollout_correction": {"kind": "truncate", "level": "sequence", "high": 1.2},
    },
    "gmpo with a KL": {"policy_loss": "gmpo", "kl": {"coef": 0.5}},
}
ALGORITHMS = {
    **{name: preset.settings["algorithm"] for name, preset in PRESETS.items()},
    **{name: {"advantage": {"scale": "group_std"}} | parts for name, parts in PARTS.items()},
}

MAX_LOG_RATIO_STD = dict.fromkeys(
    ("k3 unbiased", "vespo with TIS", "gspo with a KL", "gspo-token with a KL", "R1's equations"), 3.0
)  # beyond, the formulas themselves lose their digits in float64


def algorithm_of(name: str) -> AlgorithmConfig:
    """Process rewards and whitening come before the loss: here they would change nothing."""
    tree = ALGORITHMS[name]
    return AlgorithmConfig.model_validate({key: value for key, value in tree.items() if value != {"level": "process"}})


def run(
    algorithm: AlgorithmConfig, batches: list[MicroBatch], logprobs: list[Tensor]
) -> tuple[float, list[Tensor], Any]:
    """Loss summed over micro-batches, gradient [T] of each, and the reports."""
    loss = loss_of(algorithm)
    total = 0.0
    gradients = []
    reports = []
    for batch, values in zip(batches, logprobs, strict=True):
        leaf = values.clone().requires_grad_()
        value, report = loss(leaf, torch.ones_like(leaf), batch)
        gradients += torch.autograd.grad(value, leaf)
        total += value.item()
        reports.append(report)
    return total, gradients, reports


def check(
    update: UpdateData, algorithm: AlgorithmConfig, max_tokens: int, advantages: list[float] | None = None
) -> None:
    batches, logprobs = to_microbatches(update, algorithm, max_tokens, advantages)
    total, gradients, _ = run(algorithm, batches, logprobs)
    expected = objective(update, algorithm, advantages)
    assert abs(total - expected.loss) <= 1e-6 * expected.scale
    actual: dict[int, Tensor] = {}
    for batch, gradient in zip(batches, gradients, strict=True):
        assert torch.equal(gradient[batch.mask == 0], torch.zeros(int((batch.mask == 0).sum())))
        actual |= zip(batch.sample_ids, gather_responses(gradient, batch), strict=True)
    for i, values in enumerate(expected.gradients):
        torch.testing.assert_close(
            actual[i].double(), values, rtol=1e-6, atol=1e-9 * max(1e-3, float(values.abs().max()))
        )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("log_ratio_std", [1e-4, 0.3, 15.0])
def test_equal_to_the_objective(shape: str, log_ratio_std: float, name: str) -> None:
    lengths, groups = SHAPES[shape]
    algorithm = algorithm_of(name)
    std = min(log_ratio_std, MAX_LOG_RATIO_STD.get(name, log_ratio_std))
    for seed, first_update in enumerate((False, True)):
        update = draw_update(
            lengths, groups, seed, std, first_update, kl=algorithm.kl.coef > 0, rollout_std=min(std, 1.0)
        )
        check(update, algorithm, ONE_MICROBATCH)


@pytest.mark.parametrize("max_tokens", [4, 40])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_sum_to_the_same(max_tokens: int, name: str) -> None:
    algorithm = algorithm_of(name)
    update = draw_update(LENGTHS, PAIRS, seed=5, kl=algorithm.kl.coef > 0, rollout_std=0.2)
    check(update, algorithm, max_tokens)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_extreme_log_ratios(name: str) -> None:
    algorithm = algorithm_of(name)
    update = draw_update((4, 4), (0, 0), seed=1, log_ratio_std=0.1, kl=algorithm.kl.coef > 0)
    log_ratios = [np.array([80, -80, 60, -60], np.float32), np.array([-80, 80, 3, -3], np.float32)]
    old = [values - log_ratio for values, log_ratio in zip(update.logprobs, log_ratios, strict=True)]
    check(replace(update, rewards=[0.0, 1.0], old=old), algorithm, ONE_MICROBATCH)
    check(replace(update, rewards=[1.0, 0.0], old=old), algorithm, ONE_MICROBATCH)


def test_a_token_without_rollout_logprob_is_masked_and_is_counted() -> None:
    algorithm = AlgorithmConfig.model_validate(
        {"kl": {"coef": 0.1}, "rollout_correction": {"kind": "truncate", "high": 2.0}}
    )
    update = draw_update(LENGTHS, PAIRS, seed=2)
    (batch,), (logprobs,) = to_microbatches(update, algorithm, ONE_MICROBATCH)
    no_logprob = batch.mask.bool() & (torch.arange(len(batch.mask)) % 3 == 0)
    for value in (float("nan"), float("-inf")):
        damaged = replace(batch, rollout_logprobs=batch.rollout_logprobs.where(~no_logprob, value))
        _, (gradient,), (report,) = run(algorithm, [damaged], [logprobs])
        _, (clean,), _ = run(algorithm, [batch], [logprobs])
        assert torch.equal(gradient, clean.where(~no_logprob, 0.0))
        assert report["mismatch/tokens_without_rollout_logprob"] == no_logprob.sum()
        assert all(bool(value.isfinite()) for value in report.values())


@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
@pytest.mark.parametrize("first_update", [True, False])
def test_values_at_prompts_and_padding_do_not_matter(garbage: float, first_update: bool) -> None:
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 0.04}})
    update = draw_update(LENGTHS, (0, 0, 0, 0, 1, 1, 1, 1), seed=2, first_update=first_update)
    (batch,), (logprobs,) = to_microbatches(update, algorithm, ONE_MICROBATCH)

    def damage(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.where(batch.mask.bool(), garbage)

    damaged = replace(
        batch,
        old_logprobs=damage(batch.old_logprobs),
        reference_logprobs=damage(batch.reference_logprobs),
        rollout_logprobs=damage(batch.rollout_logprobs),
    )
    clean = run(algorithm, [batch], [logprobs])
    dirty = run(algorithm, [damaged], [damage(logprobs)])
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1][0], clean[1][0])
    entropy = torch.full_like(logprobs, garbage).where(~batch.mask.bool(), 1.0)
    _, report = loss_of(algorithm)(damage(logprobs), entropy, damaged)
    assert report == clean[2][0]


def test_a_micro_batch_without_response_tokens_has_loss_0() -> None:
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 1.0}})
    update = draw_update((3,), (0,), seed=0, log_ratio_std=1.0)
    (batch,), (logprobs,) = to_microbatches(update, algorithm, ONE_MICROBATCH)
    zeros = {name: torch.zeros_like(batch.mask) for name in ("mask", "loss_weights", "advantages")}
    loss, (gradient,), _ = run(algorithm, [replace(batch, **zeros)], [logprobs * torch.nan])
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_mean_gradient_of_each_estimate_of_the_kl() -> None:
    """Over all three tokens, weighted by their probability: that of which divergence each is."""
    logits = torch.tensor([0.8, 0.1, -0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.9, 0.6, 0.4], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    kl = gradient((policy.exp() * (policy - reference)).sum())
    reverse = gradient((reference.exp() * (reference - policy)).sum())
    assert (kl - reverse).abs().max() > 0.01
    expected = {"k1": torch.zeros(3).double(), "k2": kl, "k3_unbiased": kl, "k3": reverse, "k3_clamped": reverse}
    for name, value in expected.items():
        estimates = estimate_kl(KLConfig(estimator=name), reference - policy, (policy - policy.detach()).exp())
        torch.testing.assert_close(gradient((policy.detach().exp() * estimates).sum()), value, rtol=0, atol=1e-14)


def verl_gradients(update: UpdateData, loss: str, high: float) -> list[Tensor]:
    """The gradients of verl's gspo and gmpo with truncated token weights, as its core_algos.py defines them."""
    assert update.old is not None
    leaves = []
    total = torch.zeros((), dtype=torch.float64)
    rewards = torch.tensor(update.rewards, dtype=torch.float64)
    for i, values in enumerate(update.logprobs):
        new = torch.from_numpy(values).double().requires_grad_()
        old, rollout = (torch.from_numpy(part[i]).double() for part in (update.old, update.rollout))
        group = torch.tensor([other == update.groups[i] for other in update.groups])
        advantage = (rewards[i] - rewards[group].mean()) / (rewards[group].std() + 1e-4)
        weights = (old - rollout).exp().clamp(max=high)
        log_ratio = new - old
        if loss == "gspo":
            ratio = (log_ratio.detach().mean() + new - new.detach()).exp()
            losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage) * weights
        else:
            sign = advantage.sign()
            bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.4, 0.4))
            losses = -(bounded.mean().exp() * advantage * weights.log().mean().exp()) * torch.ones_like(new)
        total = total + losses.mean() / len(rewards)
        leaves.append(new)
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize(("preset", "verl"), [("gspo_token", "gspo"), ("gmpo", "gmpo")])
def test_token_corrections_of_losses_of_sequences_are_verls(preset: str, verl: str) -> None:
    parts = PRESETS[preset].settings["algorithm"] | {"rollout_correction": {"kind": "truncate", "high": 1.2}}
    update = draw_update(LENGTHS, PAIRS, seed=5, log_ratio_std=0.01, kl=False, rollout_std=0.3)
    algorithm = AlgorithmConfig.model_validate(parts)
    for ours, theirs in zip(objective(update, algorithm).gradients, verl_gradients(update, verl, 1.2), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    check(update, algorithm, 24)


SAMPLES = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=50)
LIMIT = 6000


def weights(samples: list[tuple[int, bool]], aggregation: str, **changes: float) -> list[list[float]]:
    lengths = [length for length, _ in samples]
    in_loss = [included for _, included in samples]
    algorithm = AlgorithmConfig.model_validate({"aggregation": aggregation, **changes})
    by_sample = token_weights(lengths, in_loss, algorithm, LIMIT)
    return [torch.as_tensor(w, dtype=torch.float64).expand(n).tolist() for n, w in zip(lengths, by_sample, strict=True)]


@given(SAMPLES)
def test_each_weight_follows_its_formula(samples: list[tuple[int, bool]]) -> None:
    count = len(samples)
    tokens = sum(length for length, included in samples if included)
    formulas = {
        "sequence_mean": lambda n: Fraction(1, count * n),
        "token_mean": lambda n: Fraction(1, tokens),
        "sequence_sum": lambda n: Fraction(1, count),
        "constant": lambda n: Fraction(1, count * LIMIT),
    }
    for name, formula in formulas.items():
        for (length, included), actual in zip(samples, weights(samples, name), strict=True):
            assert actual == [float(formula(length)) if included else 0.0] * length  # one division, rounded once


def test_the_control_token_has_a_weight_of_its_own() -> None:
    (long, short) = weights([(4, True), (1, True)], "decoupled")
    alpha = 0.001
    count = 2
    assert long == pytest.approx([alpha / count] + [1 / (3 * count)] * 3)
    assert short == pytest.approx([alpha / count])


def test_the_kl_weight_follows_its_target_at_a_bounded_pace() -> None:
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 0.1, "target": 0.5}})
    up, down = (update_adaptive_coefs({}, kl=kl, entropy=1.0, algorithm=algorithm)["kl"] for kl in (50.0, 0.0))
    assert (up, down) == (pytest.approx(0.1 * 1.02), pytest.approx(0.1 * 0.98))
    assert update_adaptive_coefs({}, kl=0.55, entropy=1.0, algorithm=algorithm)["kl"] == pytest.approx(0.1 * 1.01)
    adaptive_coefs: dict[str, float] = {}
    for _ in range(1000):  # where the KL falls with the weight, they meet at the target
        adaptive_coefs = update_adaptive_coefs(
            adaptive_coefs, 0.2 / current_coefficients(adaptive_coefs, algorithm).kl, 1.0, algorithm
        )
    assert 0.2 / adaptive_coefs["kl"] == pytest.approx(0.5, rel=0.01)


def test_the_entropy_bonus_acts_at_or_below_its_target_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.algorithms.losses.ENTROPY_STEP", 0.1)
    monkeypatch.setattr("grpo_mp.algorithms.losses.MAX_ENTROPY_COEF", 0.25)
    algorithm = AlgorithmConfig.model_validate({"entropy": {"target": 0.2}})
    assert current_coefficients({}, algorithm).entropy == 0.0
    adaptive_coefs: dict[str, float] = {}
    weights = []
    for entropy in (0.1, 0.1, 0.1, 0.5, 0.2):
        adaptive_coefs = update_adaptive_coefs(adaptive_coefs, 0.0, entropy, algorithm)
        weights.append((adaptive_coefs["entropy"], current_coefficients(adaptive_coefs, algorithm).entropy))
    assert weights == [
        pytest.approx(pair) for pair in ((0.1, 0.1), (0.2, 0.2), (0.25, 0.25), (0.15, 0.0), (0.25, 0.25))
    ]


@pytest.mark.parametrize(
    ("limits", "kl", "stops"),
    [
        ({}, 9.0, False),
        ({"max_kl": 0.1}, 0.11, True),
        ({"max_kl": 0.1}, 0.09, False),
        ({"max_kl": 0.1}, float("nan"), True),
    ],
)
def test_early_stop_limits(limits: dict[str, float], kl: float, stops: bool) -> None:
    assert should_early_stop(kl, EarlyStopConfig.model_validate(limits)) is stops
