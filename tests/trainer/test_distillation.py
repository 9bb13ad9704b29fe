"""On-policy distillation from the teacher's logprobs to the gradient, against the reverse KL written out in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.advantages import distillation_advantages
from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.losses import token_weights
from grpo_mp.algorithms.policy_losses import topk_terms
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.microbatches import plan_microbatches
from grpo_mp.batching.packing import gather_responses, pack
from grpo_mp.batching.step_batch import with_distillation
from grpo_mp.utils.types import NO_TOKEN, MicroBatch, Sample, TopLogprobs
from tests.algorithms.objective import LIMIT, loss_of, scatter_responses

LENGTHS = (5, 1, 9, 3)
GIVEN = ((), (), (True, True, False, False, True, True, True, False, True), ())
GROUP_ADVANTAGES = (1.5, -0.5, 0.25, 0.0)


def distillation(**changes: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"teacher": {"path": "http://localhost:1"}, **changes})


def test_descent_along_the_advantages_is_descent_of_the_reverse_kl() -> None:
    """Weighted by the policy, all tokens of a vocabulary give the KL's gradient by its logits, as autograd has it."""
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    advantages = distillation_advantages(policy.detach(), teacher, distillation())
    (found,) = torch.autograd.grad(-(policy.detach().exp() * advantages * logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert expected.abs().max() > 0.01


def draw(seed: int) -> tuple[list[Sample], list[np.ndarray]]:
    """Samples with logprobs of an engine and of a teacher, and those of the old policy."""
    generator = np.random.default_rng(seed)
    samples = []
    old = []
    for number, (length, given) in enumerate(zip(LENGTHS, GIVEN, strict=True)):
        rollout, teacher = (-generator.exponential(2.0, length).astype(np.float32) for _ in range(2))
        samples.append(
            Sample(
                *(0, number, (1, 2, 3), tuple(range(length)), tuple(rollout.tolist()), (0,) * length),
                truncated=False,
                generated=given,
                teacher_logprobs=tuple(teacher.tolist()),
            )
        )
        old.append(of_engine(samples[-1]) - np.float32(0.125))
    return samples, old


def of_engine(sample: Sample) -> np.ndarray:
    """The engine's logprobs of the tokens that the policy wrote."""
    mask = list(sample.generated) or [True] * len(sample.tokens)
    return np.array(sample.rollout_logprobs, np.float32)[mask]


def packed(samples: Sequence[Sample], max_tokens: int = 20) -> list[MicroBatch]:
    counts = [len(sample.tokens) - sample.given_tokens for sample in samples]
    weights = token_weights(counts, [True] * len(samples), AlgorithmConfig(aggregation="token_mean"), LIMIT)
    plans = plan_microbatches([sample.total_tokens for sample in samples], 1, max_tokens, align=4).ranks[0]
    return [pack(samples, GROUP_ADVANTAGES, weights, plan, align=4) for plan in plans]


def with_old(batch: MicroBatch, old: Sequence[np.ndarray]) -> MicroBatch:
    return replace(batch, old_logprobs=scatter_responses([torch.from_numpy(old[i]) for i in batch.sample_ids], batch))


def written_out(sample: Sample, policy: np.ndarray, group: float, config: DistillationConfig) -> list[float]:
    """The advantages of a sample's own tokens, one by one."""
    own = [i for i in range(len(sample.tokens)) if not sample.generated or sample.generated[i]]
    advantages = []
    for logprob, i in zip(policy.tolist(), own, strict=True):
        difference = sample.teacher_logprobs[i] - logprob
        advantages.append((group if config.advantage == "add" else 0.0) + config.coef * difference)
    return advantages


@pytest.mark.parametrize("changes", [{}, {"advantage": "add", "coef": 0.3}, {"coef": 2.0}])
@pytest.mark.parametrize("recomputed", [True, False], ids=["trainer", "engine"])
def test_advantages_are_those_written_out(changes: dict[str, Any], recomputed: bool) -> None:
    """Of the trainer's old logprobs where there are some, else of the engine's; zero where nothing was generated."""
    samples, old = draw(1)
    config = distillation(**changes)
    batches = packed(samples)
    assert len(batches) > 1
    if not recomputed:
        old = [of_engine(sample) for sample in samples]
    ((*distilled,),) = with_distillation([[with_old(b, old) if recomputed else b for b in batches]], config)
    seen = 0
    for batch in distilled:
        assert batch.advantages.dtype == torch.float64
        assert not batch.advantages[batch.mask == 0].any()
        for i, found in zip(batch.sample_ids, gather_responses(batch.advantages, batch), strict=True):
            expected = written_out(samples[i], old[i], GROUP_ADVANTAGES[i], config)
            assert found.tolist() == pytest.approx(expected, abs=1e-12)
            seen += 1
    assert seen == len(samples)


def test_the_gradient_of_a_token_is_minus_its_advantage_over_all_tokens() -> None:
    """At the old policy, with the mean over tokens: the objective's gradient needs no ratio and no clip."""
    samples, old = draw(2)
    config = distillation()
    algorithm = AlgorithmConfig.model_validate({"aggregation": "token_mean", "distillation": config.model_dump()})
    ((*batches,),) = with_distillation([[with_old(batch, old) for batch in packed(samples)]], config)
    total = sum(len(values) for values in old)
    for batch in batches:
        assert batch.old_logprobs is not None
        logprobs = batch.old_logprobs.clone().requires_grad_()
        loss, _ = loss_of(algorithm)(logprobs, torch.zeros_like(logprobs), batch)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        for i, found in zip(batch.sample_ids, gather_responses(gradient, batch), strict=True):
            expected = [-advantage / total for advantage in written_out(samples[i], old[i], 0.0, config)]
            assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_logprob_that_the_engine_did_not_compute_teaches_nothing() -> None:
    samples, _ = draw(3)
    samples[0] = replace(samples[0], rollout_logprobs=(math.nan, *samples[0].rollout_logprobs[1:]))
    ((*batches,),) = with_distillation([packed(samples)], distillation(advantage="add"))
    found = {
        i: values
        for batch in batches
        for i, values in zip(batch.sample_ids, gather_responses(batch.advantages, batch), strict=True)
    }
    assert found[0][0] == GROUP_ADVANTAGES[0]
    assert bool(torch.cat(list(found.values())).isfinite().all())


def with_topk(samples: Sequence[Sample], vocabulary: int, k: int) -> list[Sample]:
    """The samples with the k most likely tokens of a random teacher."""
    generator = np.random.default_rng(7)
    found = []
    for sample in samples:
        logits = torch.from_numpy(2 * generator.standard_normal((len(sample.tokens), vocabulary)))
        logprobs, ids = logits.log_softmax(-1).topk(k)
        found.append(replace(sample, teacher_topk=TopLogprobs(ids.int().numpy(), logprobs.float().numpy())))
    return found


def topk_rows(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The policy's logprobs [k + 1, T] of these tokens [T, k] and of all others, by logits [T, V]."""
    ids = ids.long().clamp(min=0)
    rest = logits.log_softmax(-1).scatter(1, ids, -torch.inf).logsumexp(-1)
    return torch.cat([logits.log_softmax(-1).gather(1, ids), rest[:, None]], 1).t()


@pytest.mark.parametrize("changes", [{"kl_type": "reverse"}, {"kl_type": "forward"}, {"kl_type": "mixed"}])
def test_the_divergence_over_buckets_is_a_lower_bound(changes: dict[str, Any]) -> None:
    """It grows with k up to that of the whole vocabulary, of which k = V - 1 leaves a bucket of one token."""
    vocabulary = 9
    kind = changes["kl_type"]
    policy, teacher = (2 * torch.randn(40, vocabulary, dtype=torch.float64) for _ in range(2))
    log_p = policy.log_softmax(-1)
    log_q = teacher.log_softmax(-1)
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    whole = {"reverse": reverse, "forward": forward, "mixed": (reverse + forward) / 2}[kind]
    found = []
    for k in (1, 3, 6, vocabulary - 1):
        logprobs, ids = log_q.topk(k)
        (batch,) = packed([Sample.from_tokens(0, (1,), range(40))], max_tokens=100)
        rows = slice(0, 40)
        for name, values in (("teacher_topk_ids", ids), ("teacher_topk_logprobs", logprobs)):
            setattr(batch, name, torch.zeros(batch.total_tokens, k, dtype=values.dtype))
            getattr(batch, name)[rows] = values
        batch.topk_logprobs = torch.zeros(k + 1, batch.total_tokens, dtype=torch.float64)
        batch.topk_logprobs[:, rows] = topk_rows(policy, ids)
        terms = topk_terms(batch, distillation(topk=k, **changes))
        assert terms is not None
        assert not terms.divergence[40:].any()
        torch.testing.assert_close(terms.teacher_mass[rows], logprobs.exp().sum(-1))
        found.append(terms.divergence[rows])
    for lower, higher in pairwise(found):
        assert bool((lower <= higher + 1e-12).all())
    assert float(found[0].mean()) < 0.7 * float(whole.mean())
    torch.testing.assert_close(found[-1], whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("advantage", ["replace", "add"])
def test_the_loss_is_that_of_rewards_and_the_weighted_divergence(advantage: str) -> None:
    """What was given or padded has neither, and no gradient; a micro-batch of padding alone has no teacher."""
    k = 3
    vocabulary = 12
    samples, old = draw(5)
    samples = with_topk(samples, vocabulary, k)
    config = distillation(topk=k, advantage=advantage, coef=0.4)
    algorithm = AlgorithmConfig.model_validate({"aggregation": "token_mean", "distillation": config.model_dump()})
    alone = AlgorithmConfig(aggregation="token_mean")
    before = [with_old(batch, old) for batch in packed(samples)]
    ((*batches,),) = with_distillation([before], config)
    total = sum(len(values) for values in old)
    for batch, undistilled in zip(batches, before, strict=True):
        assert batch.old_logprobs is not None
        assert batch.teacher_topk_ids is not None
        assert bool((batch.teacher_topk_ids[batch.sequence_index < 0] == NO_TOKEN).all())
        kept = undistilled.advantages if advantage == "add" else torch.zeros_like(batch.advantages)
        assert torch.equal(batch.advantages, kept)
        logits = torch.randn(batch.total_tokens, vocabulary, requires_grad=True)
        rows = topk_rows(logits, batch.teacher_topk_ids)
        rows.retain_grad()
        logprobs = batch.old_logprobs + 0.1
        zeros = torch.zeros(batch.total_tokens)
        loss, report = loss_of(algorithm)(logprobs, zeros, replace(batch, topk_logprobs=rows))
        loss.backward()
        of_rewards, _ = loss_of(alone)(logprobs, zeros, replace(batch, advantages=kept))
        written = torch.zeros((), dtype=torch.float64)
        of_samples = zip(batch.sample_ids, _own_rows(rows.detach(), batch), strict=True)
        for i, own in of_samples:
            topk = samples[i].teacher_topk
            mask = samples[i].generated or (True,) * len(samples[i].tokens)
            assert topk is not None
            for log_p, teacher in zip(own.double(), topk.logprobs[list(mask)], strict=True):
                q = [math.exp(value) for value in teacher]
                written += sum(p.exp() * (p - math.log(one)) for p, one in zip(log_p, [*q, 1 - sum(q)], strict=True))
        assert float(loss.detach()) == pytest.approx(float(of_rewards) + 0.4 * float(written) / total, abs=1e-6)
        assert float(report["train/pg_loss"]) == pytest.approx(float(of_rewards), abs=1e-6)
        assert rows.grad is not None
        assert not rows.grad[:, batch.mask == 0].any()
        assert bool(rows.grad[:, batch.mask == 1].any(0).all())


def _own_rows(rows: torch.Tensor, batch: MicroBatch) -> list[torch.Tensor]:
    """[generated tokens, k + 1] of each sample."""
    by_row = [gather_responses(row, batch) for row in rows]
    return [torch.stack(list(of_sample), 1) for of_sample in zip(*by_row, strict=True)]
