"""TRL's own code on the same update: losses, gradients, corrections, advantages, for everything that TRL has.

Its loss is called; the advantages and the engine correction stand inside one long method, so those statements are cut
out of its source and run.
"""

import importlib
import inspect
import math
import runpy
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import grpo_mp.platform
from grpo_mp.algorithms.advantages import estimate_decoupled, outcome_advantages
from grpo_mp.algorithms.loss_metrics import MAXIMA, SUMS, compute_metrics, merge_reports
from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.algorithms.settings import AdvantageConfig, AlgorithmConfig
from grpo_mp.batching.packing import gather_responses
from tests.algorithms.objective import (
    LIMIT,
    UpdateData,
    draw_update,
    loss_of,
    sample_infos,
    scatter_responses,
    to_microbatches,
)

pytest.importorskip("trl")
if not torch.cuda.is_available():
    # TRL imports torchvision, whose wheel is built for CUDA: the CPU engines' start-up hook lets it import.
    runpy.run_path(str(Path(grpo_mp.platform.__file__).parent / "engine_site" / "sitecustomize.py"))

from trl import GRPOTrainer
from trl.trainer import grpo_trainer

LENGTHS = (1, 9, 2, 30, 17, 4, 4, 1)
GROUP_SIZE = 4
GROUPS = [number // GROUP_SIZE for number in range(len(LENGTHS))]
CLIP = {"low": 0.1, "high": 0.25}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # loss_type -> our parts, TRL's attributes
    "grpo": ({"clip": CLIP}, {}),
    "bnpo": ({"clip": CLIP, "aggregation": "token_mean"}, {}),
    "dr_grpo": ({"clip": CLIP, "aggregation": "constant"}, {}),
    "dapo": ({"clip": CLIP, "aggregation": "token_mean"}, {}),
    "cispo": (
        {"policy_loss": "cispo", "clip": {"low": 1.0, "high": 0.5}, "aggregation": "token_mean"},
        {"epsilon_high": 1.5},
    ),
    "sapo": ({"policy_loss": "sapo"}, {}),
    "luspo": ({"clip": CLIP, "aggregation": "sequence_sum"}, {}),
    "vespo": ({"policy_loss": "vespo", "aggregation": "token_mean"}, {}),
}
CORRECTIONS = {
    f"{level}_{kind}": {"kind": kind, "level": level, "high": 1.3, "low": low}
    for level in ("token", "sequence")
    for kind, low in (("truncate", None), ("mask", 0.8))
}


def run_trl_lines(first: str, last: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run the statements of TRL's `_generate_and_score_completions` between two lines; all its names afterwards."""
    lines = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i > begin and line.strip().startswith(last))
    names = vars(grpo_trainer) | given
    exec(textwrap.dedent("\n".join(lines[begin : end + 1])), names)
    return names


def padded(values: Any) -> Tensor:
    """[samples, longest] in float64, zero behind each sample's end."""
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(sample).double() for sample in values], batch_first=True)


def trl_correction(old: Tensor, rollout: Tensor, mask: Tensor, mode: str, low: float | None) -> Tensor:
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.3,
        vllm_importance_sampling_clip_min=low,
    )
    given = {
        "self": trainer,
        "completion_mask": mask,
        "tool_mask": None,
        "old_per_token_logps": old,
        "sampling_per_token_logps": rollout,
    }
    marks = ("if self.use_vllm and self.vllm_importance_sampling_correction:", "# Compute the per-token log")
    ratio: Tensor = run_trl_lines(*marks, given)["vllm_importance_sampling_ratio"]
    return ratio


class Trl:
    """TRL's loss of an update: `_compute_loss` with what the update's settings say."""

    def __init__(
        self, update: UpdateData, algorithm: AlgorithmConfig, advantages: Sequence[float], **attributes: Any
    ) -> None:
        self.logprobs = padded(update.logprobs).requires_grad_()
        self.mask = padded([torch.ones(length) for length in LENGTHS])
        self.logged: dict[str, Any] = defaultdict(lambda: defaultdict(list))
        self.rollout = padded(update.rollout)
        self.old = padded(update.old) if update.old else self.logprobs.detach()
        if algorithm.ratio == "sequence_token":
            # TRL has no such level any more: with these old logprobs its token ratio is sg(s) pi / sg(pi).
            logprobs = self.logprobs.detach()
            mask = self.mask
            means = ((logprobs - self.old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
            self.old = logprobs - means
        self.advantages = torch.tensor(advantages, dtype=torch.float64)
        self.reference = padded(update.reference) if update.reference else None
        self.attributes = attributes
        self.algorithm = algorithm
        self.trainer = self._make_trainer()

    def _make_trainer(self) -> SimpleNamespace:
        algorithm = self.algorithm
        attributes = self.attributes
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (self.logprobs, attributes["entropies"], None),
            _metrics=self.logged,
            accelerator=SimpleNamespace(
                reduce=lambda values, reduction: values,
                gather=lambda values: values,
                pad_across_processes=lambda values, **_: values,
                num_processes=1,
                sync_gradients=True,
            ),
            args=SimpleNamespace(
                use_bias_correction_kl=algorithm.kl.estimator == "k3_unbiased",
                delta=algorithm.clip.dual_clip,
                sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
                vespo_k_pos=2.0,
                vespo_lambda_pos=3.0,
                vespo_k_neg=3.0,
                vespo_lambda_neg=2.0,
                steps_per_generation=1,
            ),
            model=SimpleNamespace(training=True),
            beta=algorithm.kl.coef,
            epsilon_low=attributes.get("epsilon_low", algorithm.clip.low),
            epsilon_high=attributes.get("epsilon_high", algorithm.clip.high),
            importance_sampling_level="token" if algorithm.ratio == "sequence_token" else algorithm.ratio,
            loss_type=attributes["loss_type"],
            current_gradient_accumulation_steps=1,
            max_completion_length=LIMIT,
            off_policy_mask_threshold=algorithm.rollout_correction.off_policy_mask_threshold,
            top_entropy_quantile=algorithm.entropy.top_quantile,
            use_vllm=algorithm.rollout_correction.kind != "none",
            vllm_importance_sampling_correction=True,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=algorithm.entropy.coef > 0,
            use_adaptive_entropy=False,
            entropy_coef=algorithm.entropy.coef,
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
        )
        trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
        return trainer

    def loss(self) -> tuple[float, Tensor]:
        """The loss, and its gradient by logprob [samples, longest]."""
        inputs = {
            "prompt_ids": torch.zeros(len(LENGTHS), 1),
            "prompt_mask": torch.ones(len(LENGTHS), 1),
            "completion_ids": torch.zeros_like(self.mask),
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "old_logps": (self.old * self.mask).sum(1),
            "sampling_per_token_logps": self.rollout,
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
        }
        correction = self.algorithm.rollout_correction
        if correction.kind != "none":
            mode = f"{correction.level}_{correction.kind}"
            inputs["importance_sampling_ratio"] = trl_correction(
                self.old, self.rollout, self.mask, mode, correction.low
            )
        method = self.attributes.get("trl_loss", GRPOTrainer._compute_loss)
        value = method(self.trainer, None, inputs)
        (gradient,) = torch.autograd.grad(value, self.logprobs)
        return value.item(), gradient


def compare(parts: dict[str, Any], first_update: bool = False, seed: int = 3, **attributes: Any) -> tuple[dict, dict]:
    """Assert equal loss and gradient; return our metrics and what TRL logged."""
    algorithm = AlgorithmConfig.model_validate(parts)
    update = draw_update(
        LENGTHS, GROUPS, seed=seed, first_update=first_update, kl=algorithm.kl.coef > 0, rollout_std=0.2
    )
    advantages = outcome_advantages(update.rewards, GROUPS, AdvantageConfig())
    (batch,), (logprobs,) = to_microbatches(update, algorithm, 10_000, advantages)
    entropies = [torch.rand(n, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(LENGTHS)]
    trl = Trl(update, algorithm, advantages, entropies=padded(entropies), **attributes)
    expected, expected_gradient = trl.loss()

    token_entropies = torch.cat(entropies)
    floor = -math.inf
    if (share := algorithm.entropy.top_quantile) < 1:
        floor = float(token_entropies.quantile(1 - share))
        token_entropies = token_entropies[token_entropies >= floor]
    batch.entropy_floor = floor
    batch.entropy_weight = 1 / len(token_entropies)
    entropy = scatter_responses([entropies[i] for i in batch.sample_ids], batch)
    leaf = logprobs.requires_grad_()
    loss, report = loss_of(algorithm)(leaf, entropy, batch)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    by_sample = dict(zip(batch.sample_ids, gather_responses(gradient, batch), strict=True))
    actual = padded([by_sample[i] for i in range(len(LENGTHS))])
    torch.testing.assert_close(actual, expected_gradient, rtol=1e-5, atol=1e-8)
    values = compute_metrics(dict(zip((*SUMS, *MAXIMA), torch.cat(merge_reports([report])).tolist(), strict=True)))
    return values, {name: logged[0] for name, logged in trl.logged["train"].items()}


def loss_type(name: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    parts, attributes = LOSSES[name]
    return parts | changes, attributes | {"loss_type": name}


KLS: dict[str, dict[str, Any]] = {
    "no KL": {},
    "k3": {"coef": 0.1},
    "unbiased k3": {"coef": 0.3, "estimator": "k3_unbiased"},
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("first_update", [False, True], ids=["later update", "first update"])
def test_every_loss_type_ratio_and_kl(name: str, kl: str, ratio: str, first_update: bool) -> None:
    parts, attributes = loss_type(name, kl=KLS[kl])
    if name == "vespo" and ratio != "token":
        with pytest.raises(ValidationError, match="set ratio=token"):  # TRL warns: the ratio is the sequence's anyway
            AlgorithmConfig.model_validate(parts | {"ratio": ratio})
        return
    compare(parts | {"ratio": ratio}, first_update=first_update, **attributes)


@pytest.mark.parametrize("correction", [None, "token_truncate", "token_mask", "sequence_truncate"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "sapo"])
def test_sequence_ratios_with_masks_and_corrections(name: str, correction: str | None) -> None:
    """What differs by token inside a sequence reaches all of its tokens through the sequence's ratio."""
    changes = {"entropy": {"top_quantile": 0.5}, "kl": {"coef": 0.1}}
    parts, attributes = loss_type(
        name, ratio="sequence", rollout_correction=CORRECTIONS.get(correction or "", {}), **changes
    )
    compare(parts, **attributes)


def compare_with_trl_class(path: str, parts: dict[str, Any], first_update: bool, **attributes: Any) -> None:
    """Compare with a trainer of TRL whose loss is a method of its own class."""
    module, _, kind = path.partition(":")
    method = vars(vars(importlib.import_module(module))[kind])["_compute_loss"]
    compare(parts, first_update=first_update, trl_loss=method, **attributes)


@pytest.mark.parametrize("first_update", [False, True])
def test_rloo_takes_the_ratio_of_whole_answers(first_update: bool) -> None:
    parts = PRESETS["rloo"].settings["algorithm"] | {"clip": {"low": 0.9, "high": 3.0}, "kl": {}}
    compare_with_trl_class("trl.trainer.rloo_trainer:RLOOTrainer", parts, first_update, loss_type="rloo")


@pytest.mark.parametrize("first_update", [False, True])
def test_gmpo(first_update: bool) -> None:
    parts = PRESETS["gmpo"].settings["algorithm"] | {"kl": {"coef": 0.1}}
    clip = {"epsilon_low": 0.4, "epsilon_high": 0.4}
    compare_with_trl_class(
        "trl.experimental.gmpo.gmpo_trainer:GMPOTrainer", parts, first_update, loss_type="grpo", **clip
    )


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_correction(name: str, correction: str) -> None:
    if name == "vespo" and correction.startswith("sequence"):
        pytest.skip("refused by both")
    parts, attributes = loss_type(name, rollout_correction=CORRECTIONS[correction])
    compare(parts, **attributes)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": CLIP | {"dual_clip": 1.4}},
        {"kl": {"coef": 0.3, "estimator": "k3_unbiased"}},
        {"rollout_correction": {"off_policy_mask_threshold": 0.02}},
        {"entropy": {"coef": 0.2}},
        {"entropy": {"top_quantile": 0.2}, "kl": {"coef": 0.1}},
        {"entropy": {"top_quantile": 0.5, "coef": 0.2}},
    ],
    ids=["delta", "unbiased KL", "off-policy mask", "entropy bonus", "entropy mask", "both"],
)
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_every_other_term(name: str, changes: dict[str, Any]) -> None:
    parts, attributes = loss_type(name, **changes)
    for seed in range(3):
        compare(parts, seed=seed, **attributes)


def trl_advantages(rewards: Tensor, weights: Tensor, scale: str, aggregation: str) -> Tensor:
    """rewards [samples, functions]; NaN where a function does not apply."""
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        reward_weights=weights,
        reward_funcs=[None] * rewards.shape[1],
        scale_rewards=scale,
    )
    given = {"self": trainer, "rewards_per_func": rewards, "num_generations": GROUP_SIZE, "device": "cpu"}
    advantages: Tensor = run_trl_lines("unscorable_mask = ", "advantages = torch.nan_to_num", given)["advantages"]
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_every_reward_scaling(scale: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randint(0, 3, (24, 1), generator=generator).double() / 2
    ids = [number // GROUP_SIZE for number in range(24)]
    expected = trl_advantages(rewards, torch.ones(1), scale, "sum_then_normalize")
    name = {"group": "group_std", "batch": "batch_std", "none": "none"}[scale]
    actual = outcome_advantages(rewards[:, 0].tolist(), ids, AdvantageConfig.model_validate({"scale": name}))
    torch.testing.assert_close(torch.tensor(actual, dtype=torch.float64), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_rewards_normalized_before_they_are_summed(missing: float) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards = torch.rand(24, 2, generator=generator, dtype=torch.float64)
    rewards[torch.rand(24, 2, generator=generator) < missing] = torch.nan
    rewards[rewards.isnan().all(1)] = 0.5
    weights = torch.tensor([2.0, 0.5], dtype=torch.float64)
    ids = [number // GROUP_SIZE for number in range(24)]
    expected = trl_advantages(rewards, weights, "group", "normalize_then_sum")
    parts = [{n: v for n, v in zip("ab", row, strict=True) if not math.isnan(v)} for row in rewards.tolist()]
    actual = estimate_decoupled(sample_infos(ids, parts), AdvantageConfig(), {"a": 2.0, "b": 0.5})
    torch.testing.assert_close(torch.tensor(actual, dtype=torch.float64), expected, rtol=1e-5, atol=1e-9)
