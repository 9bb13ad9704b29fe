"""Every training metric of a step against transformers and numpy: the same samples, the weights before each update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_mp.config import load_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.routing_replay import load_ratios
from grpo_mp.trainer.metrics import logprob_tokens, update_metrics
from grpo_mp.trainer.save import export_policy
from grpo_mp.utils.types import Prompt, Sample, SampleGroup
from tests.conftest import TinyRun
from tests.trainer.one_step import OneStep, make_batch

GROUPS = 4
SIZE = 4
UPDATES = 2
LR = 0.02
KL = 0.1
# Of the clip: narrow, so that some tokens of the second update are outside
LOW = 0.01
HIGH = 0.02
SETTINGS = (
    "layout.expert=1",
    f"training.updates_per_step={UPDATES}",
    f"optimizer.lr={LR}",
    "optimizer.lr_schedule=constant",
    "training.max_tokens_per_microbatch=48",
    f"algorithm.clip={{low: {LOW}, high: {HIGH}}}",
    "algorithm.filter.truncated=mask",
)
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Step(OneStep):
    """A step with its samples, in their order."""

    samples: list[Sample]


@pytest.fixture
def make_step(tiny_run: TinyRun, parallel: Parallel) -> Callable[..., Step]:
    def make(*overrides: str) -> Step:
        settings = load_settings(tiny_run.config, [*SETTINGS, *overrides])
        policy = Policy(settings, parallel, with_reference=settings.algorithm.kl.coef > 0)
        samples = make_samples(np.random.default_rng(0), policy.hf.int("vocab_size"), tiny_run.model)
        prompt = Prompt(0, "", samples[0].prompt_tokens)
        groups = [SampleGroup(prompt, tuple(samples[i : i + SIZE])) for i in range(0, len(samples), SIZE)]
        return Step(settings, policy, make_batch(settings, parallel, groups), samples)

    return make


def make_samples(random: np.random.Generator, vocabulary: int, model: Path) -> list[Sample]:
    """Random tokens; the engine's logprobs are those of transformers and a little noise.

    Every third sample is an episode: some of its tokens were given, with logprobs that show where one is counted.
    """
    reference = load(model)
    samples = []
    for number in range(GROUPS * SIZE):
        prompt, response = (random.integers(1, vocabulary, count).tolist() for count in random.integers(2, 15, 2))
        logprobs, _ = scored(reference, prompt, response)
        noisy = np.minimum(logprobs + random.normal(0, 0.05, len(response)), 0.0).astype(np.float32)
        is_generated = random.random(len(response)) < (0.6 if number % 3 == 1 else 2.0)
        is_generated[-1] = True
        noisy[~is_generated] = -5.0
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
                generated=tuple(is_generated.tolist()) if number % 3 == 1 else (),
                state={4: "error", 7: "timeout"}.get(number),
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
    log_distribution = distribution(model, prompt, response)
    logprobs = log_distribution.gather(1, torch.tensor(response)[:, None])[:, 0]
    return logprobs.numpy(), -(log_distribution.exp() * log_distribution).sum(-1).numpy()


def scored_all(folder: Path, samples: Sequence[Sample]) -> list[tuple[Values, Values]]:
    """Logprob and entropy at each generated token."""
    model = load(folder)
    of_all = [scored(model, sample.prompt_tokens, sample.tokens) for sample in samples]
    return [(logprobs[mask(s)], entropy[mask(s)]) for s, (logprobs, entropy) in zip(samples, of_all, strict=True)]


def mask(sample: Sample) -> NDArray[np.bool_]:
    return np.array(sample.generated or (True,) * len(sample.tokens))


def in_loss(sample: Sample) -> bool:
    return not (sample.truncated or sample.state)


def advantages(samples: Sequence[Sample]) -> Values:
    """(r - mean) / (std + 1e-4) in the group, with the sample's standard deviation as TRL takes it."""
    rewards = np.array([sample.reward for sample in samples]).reshape(GROUPS, SIZE)
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

    Truncated samples and failed episodes are masked and count in the denominator, as in TRL with
    mask_truncated_completions.
    """
    losses = []
    penalties = []
    for sample, gain, (new, _), (old, _) in zip(samples, gains, now, first, strict=True):
        ratio = np.exp(new - old)
        counts = in_loss(sample)
        losses.append(-np.minimum(ratio * gain, np.clip(ratio, 1 - LOW, 1 + HIGH) * gain).mean() * counts)
        penalties.append(k3(old - new).mean() * counts)
    new, old, entropy, engine, gain = (
        np.concatenate(values)
        for values in (
            [logprobs for logprobs, _ in now],
            [logprobs for logprobs, _ in first],
            [entropies for _, entropies in now],
            [np.array(sample.rollout_logprobs, np.float64)[mask(sample)] for sample in samples],
            [np.full(mask(sample).sum(), gain) for sample, gain in zip(samples, gains, strict=True)],
        )
    )
    ratio = np.exp(new - old)
    apart = np.abs(new - engine)
    low = ((ratio < 1 - LOW) & (gain < 0)).mean()
    high = ((ratio > 1 + HIGH) & (gain > 0)).mean()
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
        "train/ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "train/ratio/mean": ratio.mean(),
        "train/ratio/max": ratio.max(),
        "mismatch/logprob_abs_diff/mean": apart.mean(),
        "mismatch/logprob_abs_diff/max": apart.max(),
        "mismatch/token_mult_prob_error": np.exp(apart).mean(),
        "mismatch/correction/mean": 1.0,
        "mismatch/correction_masked_ratio": 0.0,
        "mismatch/off_policy_masked_ratio": 0.0,
        "mismatch/tokens_without_rollout_logprob": 0.0,
        "mismatch/band": float(np.exp(apart).mean() > 1.05),
        "mismatch/pearson": np.corrcoef(np.exp(engine), np.exp(new))[0, 1],
        "mismatch/kl": k3(new - engine).mean(),
    }


def grad_norm(folder: Path, samples: Sequence[Sample], gains: Values) -> float:
    """Of the first update, where the ratio is 1 and the KL has no gradient."""
    model = load(folder)
    for sample, gain in zip(samples, gains, strict=True):
        if in_loss(sample):
            log_distribution = distribution(model, sample.prompt_tokens, sample.tokens)
            chosen = log_distribution.gather(1, torch.tensor(sample.tokens)[:, None])
            (-float(gain) / len(samples) * chosen[mask(sample)].mean()).backward()
    norms = [param.grad.double().norm() for param in model.parameters() if param.grad is not None]
    return float(torch.stack(norms).norm())


def test_every_training_metric_of_a_step(make_step: Callable[..., Step], tiny_run: TinyRun, tmp_path: Path) -> None:
    step = make_step(f"algorithm.kl.coef={KL}")
    policy = step.policy
    per_update = GROUPS * SIZE // UPDATES
    parts = [slice(0, per_update), slice(per_update, None)]
    prepared = step.compute_logprobs()
    first = scored_all(tiny_run.model, step.samples)
    gains = advantages(step.samples)

    updates = []
    reports = []
    for number, (part, microbatches) in enumerate(zip(parts, prepared, strict=True)):
        folder = tmp_path / str(number)
        export_policy(policy, folder, tiny_run.model, 2**20)
        now = scored_all(folder, step.samples[part])
        updates.append(expected(step.samples[part], gains[part], now, first[part]))
        reports += step.train([microbatches])
    expected_metrics = {name: np.mean([update[name] for update in updates]) for name in updates[0]}
    expected_metrics |= {name: value for name, value in updates[0].items() if name.startswith("mismatch/")}
    expected_metrics["train/ratio/max"] = max(update["train/ratio/max"] for update in updates)
    assert 0 < expected_metrics["train/pg_clipfrac_low"] != expected_metrics["train/pg_clipfrac_high"] > 0
    assert expected_metrics["train/kl_loss"] > 1e-4

    lengths = [len(sample.prompt_tokens) + len(sample.tokens) for sample in step.samples]
    expected_metrics |= {
        "train/lr": LR,
        "train/updates": 2,
        "train/skipped_updates": 0,
        "train/early_stopped_updates": 0,
        "train/tokens": sum(int(mask(sample).sum()) for sample in step.samples if in_loss(sample)),
        "train/padding_ratio": 0.0,
    }
    metrics = update_metrics(reports, step.batch, planned=len(step.batch.plan))
    norm = grad_norm(tiny_run.model, step.samples[parts[0]], gains[parts[0]])
    assert reports[0].grad_norm == pytest.approx(norm, rel=1e-3)
    assert metrics.pop("train/grad_norm") == pytest.approx((norm + reports[1].grad_norm) / 2, rel=1e-3)
    assert metrics == pytest.approx(expected_metrics, rel=2e-3, abs=2e-6)
    assert logprob_tokens(prepared, step.policy.parallel) == 2 * sum(lengths)
    assert [float(advantage) for advantage in step.batch.advantages] == pytest.approx(gains.tolist())


def test_the_load_of_experts_is_what_transformers_routes(make_step: Callable[..., Step], tiny_run: TinyRun) -> None:
    step = make_step()
    cpu_group = step.policy.parallel.cpu_group
    update = step.compute_logprobs()[0]
    step.train([update])
    load_of_experts = step.policy.expert_load.take(cpu_group)
    assert load_of_experts is not None

    model = load(tiny_run.model)
    by_layer = np.zeros(tuple(load_of_experts.shape))

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
    assert load_of_experts.tolist() == by_layer.tolist()
    routed = by_layer[by_layer.any(1)]
    assert load_ratios(load_of_experts).numpy() == pytest.approx(routed / routed.mean(1, keepdims=True))

    step.policy.logprobs(update)
    no_load = step.policy.expert_load.take(cpu_group)
    assert no_load is not None
    assert not no_load.any()
    assert not len(load_ratios(no_load))


@contextmanager
def routed(policy: Policy) -> Iterator[list[Tensor]]:
    """The maps [T, experts] of what routers choose inside, of one micro-batch and layer after the other."""
    maps: list[Tensor] = []
    models = [module for model in policy.models() for module in model.modules()]
    hooks = [
        module.register_forward_hook(lambda _, __, output: maps.append(output[1]))
        for module in models
        if isinstance(module, TopKRouter)
    ]
    yield maps
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("replay", ["none", "R2"])
def test_both_updates_use_the_experts_of_the_old_logprob_pass(make_step: Callable[..., Step], replay: str) -> None:
    """The weights of the second update have moved; R2 has its routers choose as those of the step's beginning did."""
    step = make_step(f"training.router_replay={replay}", f"algorithm.kl.coef={KL}", "optimizer.lr=0.05")
    with routed(step.policy) as old:
        prepared = step.compute_logprobs()  # the passes of the reference come last
    shares = []
    reports = []
    for microbatches in prepared:
        with routed(step.policy) as now:
            reports += step.train([microbatches])
        pairs = list(zip(old, now, strict=False))
        assert len(pairs) == len(now) >= len(microbatches)
        shares.append(
            sum(int((before & ~after).sum()) for before, after in pairs) / sum(int(a.sum()) for _, a in pairs)
        )
        old = old[len(now) :]
    assert shares[0] == 0
    if replay == "none":
        assert shares[1] > 0.01
        assert all("mismatch/router_diff_ratio" not in report.measured for report in reports)
    else:
        assert shares[1] == 0
        first, second = [report.measured["mismatch/router_diff_ratio"] for report in reports]
        assert (first, second > 0.01) == (0, True)
        logged = update_metrics(reports, step.batch, planned=2)
        assert logged["mismatch/router_diff_ratio"] == 0
        assert logged["train/router_diff_ratio"] == second / 2


def test_samples_without_their_experts_are_counted(make_step: Callable[..., Step]) -> None:
    """Three of 16: their routers choose, those of the others take what they are given."""
    step = make_step("training.router_replay=R3")
    layers = step.policy.moe_layers
    groups = list[SampleGroup]()
    without = (0, 5, 6)
    ids = np.arange(step.policy.config.moe_router_topk, dtype=np.uint8)
    for first in range(0, len(step.samples), SIZE):
        samples = tuple(
            sample
            if number in without
            else replace(sample, routed_experts=np.tile(ids, (sample.total_tokens - 1, len(layers), 1)))
            for number, sample in enumerate(step.samples[first : first + SIZE], first)
        )
        groups.append(SampleGroup(Prompt(0, "", samples[0].prompt_tokens), samples))
    batch = make_batch(step.settings, step.policy.parallel, groups, moe_layers=layers)
    with routed(step.policy) as maps:
        reports = OneStep(step.settings, step.policy, batch).train([list(update) for update in batch.updates])
    assert update_metrics(reports, batch, 2)["rollout/samples_without_routed_experts"] == len(without)
    batches = [one for update in batch.updates for one in update]
    for number, one in enumerate(batches):
        assert one.routed_experts
        for routing in maps[number * len(layers) : (number + 1) * len(layers)]:
            given = routing[one.routed_experts.rows]
            assert given[:, : len(ids)].all()
            free = routing.index_fill(0, one.routed_experts.rows, True)
            assert not free[:, : len(ids)].all()
    rows = sum(len(one.routed_experts.rows) for one in batches if one.routed_experts)
    assert rows == sum(sample.total_tokens - 1 for i, sample in enumerate(step.samples) if i not in without)
