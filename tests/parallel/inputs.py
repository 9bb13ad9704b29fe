"""What every case is given: settings, samples, and old and reference logprobs that do not depend on the layout."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_mp.algorithms.losses import token_weights
from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.updates import PackingRule, UpdatePlan, microbatches, plan_updates
from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.layout import IndexerShape, ModelShape
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.utils.types import MicroBatch, Sample
from tests.parallel.cases import LORA, SMALL, Case

TEMPERATURE = 0.7
KL_WEIGHT = 0.2
MTP_WEIGHT = 0.3
CLIPRANGE_VALUE = 0.2
UPDATES = 2
SAVED_AFTER = UPDATES - 1  # updates that a checkpoint has
GROUP_SIZE = 4
SAMPLES = 8 * UPDATES


FAMILY: dict[str, dict[str, Any]] = {  # algorithms whose gradient must not depend on the layout
    **{
        name: {"preset": name, **preset.settings["algorithm"]}
        for name, preset in PRESETS.items()
        if "distillation" not in preset.settings["algorithm"]  # which has no gradient without a teacher
    },
    # With the limits of the presets no token leaves the region.
    "dppo_tv": {"policy_loss": "dppo_tv", "clip": {"low": 1e-3, "high": 1e-3}, "aggregation": "constant"},
    "dppo_kl": {"policy_loss": "dppo_kl", "clip": {"low": 1e-5, "high": 1e-5}, "aggregation": "constant"},
    "sequence_correction": {"rollout_correction": {"kind": "truncate", "level": "sequence", "high": 1.5}},
    "sequence_mask": {
        "ratio": "sequence",
        "rollout_correction": {"kind": "mask", "level": "sequence", "low": 0.5, "high": 2},
    },
    "masks_of_sequences": {"rollout_correction": {"masks": {"seq_mean_k1": [0.99, 1.01], "seq_max_k2": 0.01}}},
    "off_policy_mask": {"rollout_correction": {"off_policy_mask_threshold": 0.001}},
    "top_entropy": {"entropy": {"top_quantile": 0.3, "coef": 0.1}, "aggregation": "token_mean"},
    "truncated_masked": {"filter": {"truncated": "mask"}, "aggregation": "token_mean"},
    "kl_in_reward": {"kl": {"coef": 0.1, "estimator": "k3", "apply_to": "reward"}},
    "unbiased_kl": {"kl": {"coef": 0.1, "estimator": "k3_unbiased"}},
    "unbiased_kl_of_sequences": {"ratio": "sequence", "kl": {"coef": 0.1, "estimator": "k3_unbiased"}},
    "top_entropy_of_sequences": {"ratio": "sequence", "entropy": {"top_quantile": 0.3}},
    "r1_equations": {"ratio": "product", "kl": {"coef": 0.1, "level": "sequence"}},
}


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step. Their `rollout_logprobs` are near the policy's and serve as the old logprobs, too."""

    samples: tuple[Sample, ...]
    advantages: tuple[float, ...]

    @property
    def first_update(self) -> range:
        """Which samples the first update is made of."""
        return range(len(self.samples) // UPDATES)

    def sequence(self, sample: int) -> tuple[int, ...]:
        """Prompt and response."""
        return self.samples[sample].prompt_tokens + self.samples[sample].tokens


def random_samples(vocabulary: int) -> tuple[Sample, ...]:
    """One prompt of 1 to 12 tokens for each group, responses of 1 to 40; rollout logprobs are still zero.

    Token 0 pads, and a random model has zeros for its embedding, which would blow its gradient up: leave it out.
    """
    draw = random.Random(0)

    def tokens(longest: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, vocabulary) for _ in range(draw.randint(1, longest)))

    samples = []
    prompt = ()
    for number in range(SAMPLES):
        group, index = divmod(number, GROUP_SIZE)
        prompt = prompt if index else tokens(12)
        response = tokens(40)
        versions = tuple(draw.randrange(5) for _ in response)
        sample = Sample(group, index, prompt, response, (0.0,) * len(response), versions, draw.random() < 0.5)
        steps = ((len(response) // 3, draw.random()), (len(response) - 1, draw.random()))
        samples.append(replace(sample, reward=draw.random(), step_rewards=steps[-min(2, len(response)) :]))
        samples[-1] = replace(samples[-1], is_correct=samples[-1].reward > 0.5)
    return tuple(samples)


def add_rollout_logprobs(samples: Sequence[Sample], logprobs: Sequence[torch.Tensor]) -> StepSamples:
    """`logprobs`: of each response, by the present policy. The old ones are drawn around them, some beyond the clip."""
    generator = torch.Generator().manual_seed(1)
    placed = tuple(
        replace(sample, rollout_logprobs=tuple((own + 0.15 * torch.randn(own.shape, generator=generator)).tolist()))
        for sample, own in zip(samples, logprobs, strict=True)
    )
    return StepSamples(placed, tuple(torch.randn(len(placed), generator=generator).tolist()))


def reference_logprobs(old: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Some reference, up to 0.3 away from the old logprobs of these tokens."""
    return old + 0.3 * torch.sin(tokens.float())


def with_choices(samples: Sequence[Sample], shape: ModelShape) -> tuple[Sample, ...]:
    """Add random experts to the samples and, for a model with indexers, random keys.

    The samples of a group have the same experts in their prompt. The samples of every third group get no choices.
    """

    def draw(rows: int, *seed: int) -> np.ndarray:
        sizes = (rows, shape.num_moe_layers, shape.num_experts)
        return np.random.default_rng(seed).random(sizes).argsort(-1)[..., : shape.experts_per_token].astype(np.uint8)

    def experts(sample: Sample) -> np.ndarray:
        response = draw(len(sample.tokens) - 1, sample.group_id, sample.index)
        return np.concatenate((draw(len(sample.prompt_tokens), sample.group_id), response))

    def choices(sample: Sample) -> np.ndarray:
        return with_keys(experts(sample), shape.indexer, sample.index) if shape.indexer else experts(sample)

    return tuple(
        sample if sample.group_id % 3 == 1 else replace(sample, routed_experts=choices(sample)) for sample in samples
    )


def with_keys(experts: np.ndarray, indexer: IndexerShape, seed: int) -> np.ndarray:
    """Add random keys: of a token after the first top-k, positions up to its own; of others -1."""
    sizes = (len(indexer.layers), indexer.topk)
    kinds = [("experts", experts.dtype, experts.shape[1:]), ("keys", np.int32, sizes)]
    choices = np.empty(len(experts), np.dtype(kinds))
    choices["experts"] = experts
    choices["keys"] = -1
    generator = np.random.default_rng(seed)
    for position in range(indexer.topk, len(experts)):
        draws = generator.random((sizes[0], position + 1)).argsort(-1)
        choices["keys"][position] = draws[:, : indexer.topk]
    return choices


def settings_of(case: Case, model: Path) -> Settings:
    """Settings of a case. Adam's large eps keeps an update a smooth function of the gradient."""
    training = {"updates_per_step": UPDATES, "max_tokens_per_microbatch": 120, "logprob_chunk_tokens": 50}
    tree: dict[str, Any] = {
        "run": {"folder": "unused", "steps": 2},
        "model": {"path": str(model), "dtype": "float32", "mtp_loss_scaling_factor": MTP_WEIGHT * case.trains_mtp},
        "layout": case.sizes,
        "data": {"train": "unused"},
        "rollout": {
            "prompts_per_step": SAMPLES // GROUP_SIZE,
            "group_size": GROUP_SIZE,
            "max_prompt_tokens": 12,
            "max_response_tokens": 40,
            "temperature": TEMPERATURE,
        },
        "reward": {"boxed": 1.0},
        "algorithm": {"kl": {"coef": KL_WEIGHT}},
        "optimizer": {"lr": 1e-2, "eps": 1e-2, "warmup_updates": 1, "lr_schedule": "linear", "weight_decay": 0.1},
        "training": training | case.training,
    }
    if case.lora:
        tree["model"]["lora"] = LORA
    return check_settings(tree, case.name)


def fixed_head(width: int) -> torch.Tensor:
    """The value head of a critic, [1, width]."""
    return 0.1 * torch.randn(1, width, generator=torch.Generator().manual_seed(2))


def old_values(targets: torch.Tensor) -> torch.Tensor:
    """Old values of the states before these tokens: some are clipped."""
    return 0.4 * torch.sin(3.0 * targets.float())


def returns_of(targets: torch.Tensor) -> torch.Tensor:
    """What a critic learns of them."""
    return torch.cos(targets.double())


def with_fixed_returns(batch: MicroBatch) -> MicroBatch:
    """With old values and returns that do not depend on the layout."""
    return replace(batch, values=old_values(batch.targets), returns=returns_of(batch.targets))


def plan_step(given: StepSamples, settings: Settings, parallel: Parallel) -> tuple[UpdatePlan, ...]:
    max_tokens = settings.training.max_tokens_per_microbatch
    with_mtp = settings.model.trains_mtp
    rule = PackingRule(settings.layout, parallel.dp_size, max_tokens, SMALL["hidden_size"], with_mtp=with_mtp)
    return plan_updates(
        [sample.total_tokens for sample in given.samples],
        UPDATES,
        rule,
        prompts=[SamplePrompt(sample.group_id, len(sample.prompt_tokens)) for sample in given.samples]
        if settings.training.share_prompts
        else (),
    )


def step_microbatches(given: StepSamples, settings: Settings, parallel: Parallel) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each update, with old and reference logprobs."""
    samples = dict(enumerate(given.samples))
    updates = []
    for update in plan_step(given, settings, parallel):
        lengths = [len(samples[i].tokens) for i in update.samples]
        limit = settings.rollout.max_response_tokens
        weights = token_weights(lengths, [True] * len(lengths), settings.algorithm, limit)
        coordinates = (parallel.coords.data, parallel.coords.context)
        batches = microbatches(update, samples, given.advantages, weights, *coordinates)
        updates.append([_with_fixed(batch) for batch in batches])
    return updates


def _with_fixed(batch: MicroBatch) -> MicroBatch:
    old = batch.rollout_logprobs
    return replace(batch, old_logprobs=old, reference_logprobs=reference_logprobs(old, batch.targets))
