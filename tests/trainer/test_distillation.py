"""On-policy distillation from the teacher's logprobs to the gradient, against the reverse KL written out in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.advantages import distillation_advantages
from grpo_mp.algorithms.losses import token_weights
from grpo_mp.algorithms.settings import AlgorithmConfig, DistillationConfig
from grpo_mp.batching.microbatches import plan_microbatches
from grpo_mp.batching.packing import gather_responses, pack
from grpo_mp.batching.step_batch import with_distillation
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.trainer.metrics import distillation_metrics
from grpo_mp.types import MicroBatch, Sample
from tests.algorithms.objective import LIMIT, loss_of, scatter_responses

LENGTHS = (5, 1, 9, 3)
GIVEN = ((), (), (True, True, False, False, True, True, True, False, True), ())
GROUP_ADVANTAGES = (1.5, -0.5, 0.25, 0.0)


def distillation(**changes: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"teacher": {"url": "http://localhost:1"}, **changes})


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
    generator, samples, old = np.random.default_rng(seed), [], []
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
        if config.clip is not None:
            difference = max(-config.clip, min(config.clip, difference))
        advantages.append((group if config.advantage == "add" else 0.0) + config.coef * difference)
    return advantages


@pytest.mark.parametrize("changes", [{}, {"advantage": "add", "coef": 0.3}, {"clip": 0.5, "coef": 2.0}])
@pytest.mark.parametrize("recomputed", [True, False], ids=["trainer", "engine"])
def test_advantages_are_those_written_out(changes: dict[str, Any], recomputed: bool) -> None:
    """Of the trainer's old logprobs where there are some, else of the engine's; zero where nothing was generated."""
    samples, old = draw(1)
    config, batches = distillation(**changes), packed(samples)
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


def test_metrics_are_of_the_tokens_that_the_policy_wrote(parallel: Parallel) -> None:
    samples, _ = draw(4)
    differences = np.array(
        [
            sample.rollout_logprobs[i] - sample.teacher_logprobs[i]
            for sample in samples
            for i in range(len(sample.tokens))
            if not sample.generated or sample.generated[i]
        ]
    )
    assert distillation_metrics([packed(samples)], None, parallel) == {}
    found = distillation_metrics([packed(samples)], distillation(clip=1.5), parallel)
    assert found == pytest.approx(
        {
            "distill/reverse_kl/mean": differences.mean(),
            "distill/reverse_kl/max": differences.max(),
            "distill/clipped_ratio": (abs(differences) > 1.5).mean(),
        }
    )
    assert 0 < found["distill/clipped_ratio"] < 1
    assert distillation_metrics([packed(samples)], distillation(), parallel)["distill/clipped_ratio"] == 0
