"""TRL's own loss and advantages on the same update."""

import runpy
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_mp.platform
from grpo_mp.algorithms.advantages import group_advantages
from grpo_mp.algorithms.losses import make_loss
from grpo_mp.algorithms.report import MAXIMA, SUMS, merge, metrics
from grpo_mp.config import Algorithm
from grpo_mp.data.pack import gather_responses
from tests.algorithms.objective import Drawn, as_microbatches, draw

pytest.importorskip("trl")
if not torch.cuda.is_available():
    # TRL imports torchvision, whose wheel is built for CUDA: the CPU engines' start-up hook lets it import.
    runpy.run_path(str(Path(grpo_mp.platform.__file__).parent / "engine_site" / "sitecustomize.py"))

from trl import GRPOTrainer
from trl.trainer.utils import nanstd

ALGORITHM = Algorithm.model_validate({"kl": {"weight": 0.1}, "clip": {"low": 0.1, "high": 0.25}})
LENGTHS, GROUP_SIZE = (1, 9, 2, 30, 17, 4, 4, 1), 4


def padded(values: Any) -> Tensor:
    """[samples, longest], zero behind each sample's end."""
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(one) for one in values], batch_first=True)


def trl_loss(drawn: Drawn, advantages: Tensor) -> tuple[float, Tensor, dict[str, float]]:
    """What TRL's trainer computes in training: loss, gradient by logprob, logged metrics."""
    logprobs = padded(drawn.logprobs).requires_grad_()
    mask = padded([torch.ones(length) for length in LENGTHS])
    logged: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.ones_like(logprobs), None),
        _metrics=logged,
        accelerator=SimpleNamespace(reduce=lambda values, reduction: values, gather=lambda values: values),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        model=SimpleNamespace(training=True),
        beta=ALGORITHM.kl.weight,
        epsilon_low=ALGORITHM.clip.low,
        epsilon_high=ALGORITHM.clip.high,
        importance_sampling_level="token",
        loss_type="grpo",
        current_gradient_accumulation_steps=1,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": padded(drawn.old) if drawn.old else None,
        "ref_per_token_logps": padded(drawn.reference),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, {name: values[0] for name, values in logged["train"].items()}


def trl_advantages(rewards: list[float]) -> Tensor:
    """The lines of TRL's `_generate_and_score_completions`, with its own standard deviation."""
    grouped = torch.tensor(rewards).view(-1, GROUP_SIZE)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (nanstd(grouped, dim=1)[:, None] + 1e-4)).flatten()


@pytest.mark.parametrize("first", [False, True])
def test_loss_gradient_and_metrics_are_trl_s(first: bool) -> None:
    groups = [number // GROUP_SIZE for number in range(len(LENGTHS))]
    drawn = draw(LENGTHS, groups, seed=3, apart=0.3, first=first, kl=True)
    advantages = trl_advantages(drawn.rewards)
    ours = group_advantages(drawn.rewards, groups, True, 1e-4)
    torch.testing.assert_close(torch.tensor(ours), advantages, rtol=1e-5, atol=1e-6)

    (batch,), (logprobs,) = as_microbatches(drawn, ALGORITHM, 10_000)
    leaf = logprobs.requires_grad_()
    loss, report = make_loss(ALGORITHM)(leaf, torch.ones_like(leaf), batch)
    (gradient,) = torch.autograd.grad(loss, leaf)
    values = metrics(dict(zip((*SUMS, *MAXIMA), torch.cat(merge([report])).tolist(), strict=True)))

    expected, expected_gradient, logged = trl_loss(drawn, advantages)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    by_sample = dict(zip(batch.sample_ids, gather_responses(gradient, batch), strict=True))
    found = padded([by_sample[i] for i in range(len(LENGTHS))])
    torch.testing.assert_close(found, expected_gradient, rtol=1e-4, atol=1e-6)
    assert values["train/kl_loss"] == pytest.approx(logged["kl"], rel=1e-5)
    assert values["train/pg_clipfrac_low"] == pytest.approx(logged["clip_ratio/low_mean"])
    assert values["train/pg_clipfrac_high"] == pytest.approx(logged["clip_ratio/high_mean"])
