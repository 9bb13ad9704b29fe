"""Every training metric of a step against transformers and numpy: the same samples, the weights before each update."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.step_batch import StepBatch, assemble_step_batch
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config import Settings, load_settings
from grpo_mp.distributed.process_groups import Parallel, single_process_group, start_parallel, stop_parallel
from grpo_mp.policy.expert_load import heat_map, over_mean, worst_ratio
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.context import TrainContext
from grpo_mp.trainer.kl_watch import watched
from grpo_mp.trainer.logprobs import compute_logprobs
from grpo_mp.trainer.metrics import logprob_tokens, update_metrics
from grpo_mp.trainer.save import export_policy
from grpo_mp.trainer.update import train_step
from grpo_mp.types import Prompt, Sample, SampleGroup
from tests.conftest import TinyRun

GROUPS, SIZE, UPDATES, LR, KL = 4, 4, 2, 0.02, 0.1
LOW, HIGH = 0.01, 0.02  # of the clip: narrow, so that some tokens of the second update are outside
SETTINGS = (
    "layout.expert=1",
    f"optimizer.updates_per_step={UPDATES}",
    f"optimizer.lr={LR}",
    "optimizer.decay=constant",
    "optimizer.max_tokens_per_microbatch=48",
    f"algorithm.clip={{low: {LOW}, high: {HIGH}}}",
    "algorithm.filter.truncated=mask",
)
Values = NDArray[np.float64]


@pytest.fixture(scope="module")
def parallel(tiny_run: TinyRun) -> Iterator[Parallel]:
    with single_process_group():
        yield start_parallel(load_settings(tiny_run.config, list(SETTINGS)).layout, 0, 60.0)
        stop_parallel()


@dataclass(frozen=True)
class Step:
    """A step on one rank without its engine: the samples are made up, all else is the trainer's own."""

    session: TrainContext
    batch: StepBatch
    samples: list[Sample]  # in the order of the step

    @property
    def policy(self) -> Policy:
        return self.session.policy


@pytest.fixture
def make_step(tiny_run: TinyRun, parallel: Parallel) -> Callable[..., Step]:
    def make(*overrides: str) -> Step:
        settings = load_settings(tiny_run.config, [*SETTINGS, *overrides])
        policy = Policy(settings, parallel, with_reference=settings.algorithm.kl.measured_share > 0)
        samples = made_up(np.random.default_rng(0), policy.hf.int("vocab_size"), tiny_run.model)
        prompt = Prompt(0, "", samples[0].prompt_tokens)
        groups = [SampleGroup(prompt, tuple(samples[i : i + SIZE])) for i in range(0, len(samples), SIZE)]
        infos = all_gather_sample_info(groups, parallel.cpu_group)
        batch = assemble_step_batch(groups, infos, {}, settings, parallel, policy.config.hidden_size, step=1)
        return Step(session_of(settings, parallel, policy), batch, samples)

    return make


def session_of(settings: Settings, parallel: Parallel, policy: Policy) -> TrainContext:
    """Without engine, data and screen, which the updates of a step do not touch."""
    absent: dict[str, Any] = dict.fromkeys(
        ("inputs", "rollout", "sync", "scheduler", "timeline", "progress", "stop"), None
    )
    return TrainContext(settings=settings, parallel=parallel, policy=policy, state=TrainState(), **absent)


def made_up(random: np.random.Generator, vocabulary: int, model: Path) -> list[Sample]:
    """Random tokens; the engine's logprobs are those of transformers and a little noise."""
    judge = load(model)
    samples = []
    for number in range(GROUPS * SIZE):
        prompt, response = (random.integers(1, vocabulary, count).tolist() for count in random.integers(2, 15, 2))
        logprobs, _ = scored(judge, prompt, response)
        noisy = np.minimum(logprobs + random.normal(0, 0.05, len(response)), 0.0).astype(np.float32)
        samples.append(
            Sample(
                group_id=number // SIZE,
                index=number % SIZE,
                prompt_tokens=tuple(prompt),
                tokens=tuple(response),
                rollout_logprobs=tuple(noisy.tolist()),
                weight_versions=(0,) * len(response),
                truncated=number in (2, 9),
                reward=float(random.integers(0, 3)),
            )
        )
    return samples


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def distribution(model: torch.nn.Module, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Logprobs of every token of the vocabulary at each response position: [response, V]."""
    tokens = torch.tensor([[*prompt, *response]])
    return model(tokens).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


@torch.no_grad()
def scored(model: torch.nn.Module, prompt: Sequence[int], response: Sequence[int]) -> tuple[Values, Values]:
    """Logprob and entropy at each response token."""
    whole = distribution(model, prompt, response)
    return whole.gather(1, torch.tensor(response)[:, None])[:, 0].numpy(), -(whole.exp() * whole).sum(-1).numpy()


def scored_all(folder: Path, samples: Sequence[Sample]) -> list[tuple[Values, Values]]:
    model = load(folder)
    return [scored(model, one.prompt_tokens, one.tokens) for one in samples]


def advantages(samples: Sequence[Sample]) -> Values:
    """(r - mean) / (std + 1e-4) in the group, with the sample's standard deviation as TRL takes it."""
    rewards = np.array([one.reward for one in samples]).reshape(GROUPS, SIZE)
    spread = rewards.std(1, ddof=1, keepdims=True)
    return ((rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-4)).ravel()


def k3(log_r: Values) -> Values:
    return np.exp(log_r) - log_r - 1


def expected(
    samples: Sequence[Sample],
    gains: Values,
    now: Sequence[tuple[Values, Values]],
    first: Sequence[tuple[Values, Values]],
) -> dict[str, float]:
    """One update of GRPO with a clip and a KL loss, whose reference is the first policy.

    Truncated samples are masked and count in the denominator, as in TRL with mask_truncated_completions.
    """
    losses, penalties = [], []
    for sample, gain, (new, _), (old, _) in zip(samples, gains, now, first, strict=True):
        ratio, learns = np.exp(new - old), not sample.truncated
        losses.append(-np.minimum(ratio * gain, np.clip(ratio, 1 - LOW, 1 + HIGH) * gain).mean() * learns)
        penalties.append(k3(old - new).mean() * learns)
    new, old, entropy, engine, gain = (
        np.concatenate(values)
        for values in (
            [one for one, _ in now],
            [one for one, _ in first],
            [one for _, one in now],
            [np.array(one.rollout_logprobs, np.float64) for one in samples],
            [np.full(len(one.tokens), gain) for one, gain in zip(samples, gains, strict=True)],
        )
    )
    ratio, apart = np.exp(new - old), np.abs(new - engine)
    low, high = ((ratio < 1 - LOW) & (gain < 0)).mean(), ((ratio > 1 + HIGH) & (gain > 0)).mean()
    policy_loss = float(np.mean(losses))
    return {
        "train/loss": policy_loss + KL * np.mean(penalties),
        "train/pg_loss": policy_loss,
        "train/kl_loss": k3(old - new).mean(),
        "train/entropy": entropy.mean(),
        "train/ppo_kl": (old - new).mean(),
        "train/pg_clipfrac": low + high,
        "train/pg_clipfrac_low": low,
        "train/pg_clipfrac_high": high,
        "train/effective_samples": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "train/ratio/mean": ratio.mean(),
        "train/ratio/max": ratio.max(),
        "mismatch/logprob_abs_diff/mean": apart.mean(),
        "mismatch/logprob_abs_diff/max": apart.max(),
        "mismatch/token_mult_prob_error": np.exp(apart).mean(),
        "mismatch/correction/mean": 1.0,
        "mismatch/corrected_away_ratio": 0.0,
        "mismatch/off_policy_masked_ratio": 0.0,
        "mismatch/unheard_tokens": 0.0,
        "mismatch/band": float(np.exp(apart).mean() > 1.05),
        "mismatch/pearson": np.corrcoef(np.exp(engine), np.exp(new))[0, 1],
        "mismatch/kl": k3(new - engine).mean(),
    }


def grad_norm(folder: Path, samples: Sequence[Sample], gains: Values) -> float:
    """Of the first update, where the ratio is 1 and the KL has no gradient."""
    model = load(folder)
    for sample, gain in zip(samples, gains, strict=True):
        if not sample.truncated:
            whole = distribution(model, sample.prompt_tokens, sample.tokens)
            chosen = whole.gather(1, torch.tensor(sample.tokens)[:, None])
            (-float(gain) / len(samples) * chosen.mean()).backward()
    norms = [one.grad.double().norm() for one in model.parameters() if one.grad is not None]
    return float(torch.stack(norms).norm())


def test_every_training_metric_of_a_step(make_step: Callable[..., Step], tiny_run: TinyRun, tmp_path: Path) -> None:
    step = make_step(f"algorithm.kl.weight={KL}")
    policy, per_update = step.policy, GROUPS * SIZE // UPDATES
    parts = [slice(0, per_update), slice(per_update, None)]
    fixed = compute_logprobs(step.session, step.batch)
    first, gains = scored_all(tiny_run.model, step.samples), advantages(step.samples)

    updates, reports = [], []
    for number, (part, microbatches) in enumerate(zip(parts, fixed, strict=True)):
        folder = tmp_path / str(number)
        export_policy(policy, folder, tiny_run.model, 2**20)
        now = scored_all(folder, step.samples[part])
        updates.append(expected(step.samples[part], gains[part], now, first[part]))
        reports += train_step(step.session, [microbatches])
    both = {name: np.mean([one[name] for one in updates]) for name in updates[0]}
    both |= {name: value for name, value in updates[0].items() if name.startswith("mismatch/")}
    both["train/ratio/max"] = max(one["train/ratio/max"] for one in updates)
    assert 0 < both["train/pg_clipfrac_low"] != both["train/pg_clipfrac_high"] > 0
    assert both["train/kl_loss"] > 1e-4

    lengths = [len(one.prompt_tokens) + len(one.tokens) for one in step.samples]
    both |= {
        "train/lr": LR,
        "train/updates": 2,
        "train/skipped_updates": 0,
        "train/drift_skipped_updates": 0,
        "train/tokens": sum(len(one.tokens) for one in step.samples if not one.truncated),
        "train/padding_ratio": 0.0,
    }
    found = update_metrics(reports, step.batch, planned=len(step.batch.plan))
    norm = grad_norm(tiny_run.model, step.samples[parts[0]], gains[parts[0]])
    assert reports[0].grad_norm == pytest.approx(norm, rel=1e-3)
    assert found.pop("train/grad_norm") == pytest.approx((norm + reports[1].grad_norm) / 2, rel=1e-3)
    assert found == pytest.approx(both, rel=2e-3, abs=2e-6)
    assert logprob_tokens(fixed, step.session.parallel) == 2 * sum(lengths)
    assert [float(one) for one in step.batch.advantages] == pytest.approx(gains.tolist())


def test_the_load_of_experts_is_what_transformers_routes(make_step: Callable[..., Step], tiny_run: TinyRun) -> None:
    step = make_step()
    host = step.session.parallel.cpu_group
    (mine,) = compute_logprobs(step.session, step.batch)[:1]
    train_step(step.session, [mine])
    load_here = step.policy.expert_load.take(host)
    assert load_here is not None

    model = load(tiny_run.model)
    by_layer = np.zeros(tuple(load_here.shape))

    def count(layer: int) -> Callable[..., None]:
        def hook(module: object, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
            np.add.at(by_layer[layer], arguments[1].flatten().numpy(), 1)

        return hook

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            block.mlp.experts.register_forward_pre_hook(count(layer))
    for sample in step.samples[: GROUPS * SIZE // UPDATES]:
        scored(model, sample.prompt_tokens, sample.tokens)
    assert by_layer.any()
    assert load_here.tolist() == by_layer.tolist()
    routed = by_layer[by_layer.any(1)]
    assert worst_ratio(load_here) == pytest.approx((routed.max(1) / routed.mean(1)).max())
    assert over_mean(load_here).numpy() == pytest.approx(routed / routed.mean(1, keepdims=True))
    assert len(heat_map(load_here).splitlines()) == len(routed)

    step.policy.logprobs(mine)
    nothing = step.policy.expert_load.take(host)
    assert nothing is not None
    assert not nothing.any()
    assert worst_ratio(nothing) is None


def test_the_drawing_of_a_heat_map() -> None:
    assert heat_map(torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 9.0]])) == (
        "    layer   2 | ▃█| busiest: expert 2, 2.25 x the mean"
    )


def test_the_kl_is_watched_at_weight_0_and_moves_nothing(make_step: Callable[..., Step], tiny_run: TinyRun) -> None:
    none = "algorithm.kl.weight=0"
    step, plain = make_step(none, "algorithm.kl.watch_share=0.3"), make_step(none)
    assert (plain.policy.reference, step.policy.reference is None) == (None, False)
    with torch.no_grad():
        for tensor in [*step.policy.tensors.values(), *plain.policy.tensors.values()]:
            tensor.mul_(1.02)  # the policy has left its reference
    fixed = compute_logprobs(step.session, step.batch)
    every = [one for update in fixed for one in update]
    measured = [one for one in every if one.reference_logprobs is not None]
    assert len(measured) == -(-3 * len(every) // 10) < len(every)

    reports = train_step(step.session, fixed[:1])
    expected_reports = train_step(plain.session, compute_logprobs(plain.session, plain.batch)[:1])
    assert reports[0].grad_norm == expected_reports[0].grad_norm
    assert all(torch.equal(one, plain.policy.tensors[name]) for name, one in step.policy.tensors.items())
    assert "train/kl_loss" not in expected_reports[0].measured

    reference = load(tiny_run.model)
    for update, plan in zip(fixed, step.batch.plan, strict=True):
        for one in (one for one in update if one.reference_logprobs is not None):
            samples = [step.samples[plan.samples[i]] for i in one.sample_ids]
            logprobs = [scored(reference, sample.prompt_tokens, sample.tokens)[0] for sample in samples]
            found = one.reference_logprobs[one.mask.bool()]  # type: ignore[index]
            assert found.numpy() == pytest.approx(np.concatenate(logprobs), abs=2e-5)


def test_watched_microbatches_are_drawn_evenly_in_blocks_and_alike_on_every_rank() -> None:
    assert watched([4, 8], 0.5, 1, "0/1") == watched([4, 8], 0.5, 1, "0/1")
    assert [len(part) for part in watched([4, 8], 1.0, 2, "a")] == [4, 8]
    assert sum(map(len, watched([8, 8], 0.01, 4, "a"))) == 4
    drawn = np.zeros(12)
    for seed in range(2000):
        first, second = watched([4, 8], 0.25, 2, str(seed))
        assert all(part[0::2] == [place - 1 for place in part[1::2]] for part in (first, second))
        for place in (*first, *(4 + one for one in second)):
            drawn[place] += 1
    assert drawn / 2000 == pytest.approx(np.full(12, 4 / 12), abs=0.05)  # of 6 blocks, 2
