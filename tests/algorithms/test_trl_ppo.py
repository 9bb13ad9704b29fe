"""TRL's own PPO on the same update: advantages, returns, both losses and their gradients.

The TRL that other tests compare with has none any more; launch/requirements-trl-ppo.txt names one that has. Its
algorithm stands inside one long method: those statements are cut out of its source and run. Answers are as long as the
limit: of a shorter one TRL places the reward, and one more value, behind its last token.
"""

import inspect
import runpy
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_mp.platform
from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.algorithms.values import make_value_loss
from grpo_mp.batching.packing import gather_responses
from grpo_mp.batching.step_batch import whiten
from grpo_mp.batching.values import with_generalized_advantages, with_values
from grpo_mp.distributed.process_groups import Parallel
from tests.algorithms.objective import draw_update, loss_of, to_microbatches

if not torch.cuda.is_available():
    # TRL imports torchvision, whose wheel is built for CUDA: the CPU engines' start-up hook lets it import.
    runpy.run_path(str(Path(grpo_mp.platform.__file__).parent / "engine_site" / "sitecustomize.py"))
ppo_trainer = pytest.importorskip("trl.trainer.ppo_trainer", reason="this TRL has no PPO")

SAMPLES = 8
TOKENS = 11
CLIP_VALUE = 0.2
TOLERANCE = 1e-7  # TRL whitens by the root of variance + 1e-8, here it is standard deviation + 1e-8
ADVANTAGES = ("logr = ref_logprobs - logprobs", "advantages = torch.masked_fill(advantages, padding_mask, 0)")
LOSSES = ("new_logprobs = torch.masked_fill(", "loss = pg_loss + args.vf_coef * vf_loss")


def run_lines(first: str, last: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run the statements of TRL's `train` from one line to another; all its names afterwards."""
    lines = inspect.getsource(ppo_trainer.PPOTrainer.train).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i > begin and line.strip().startswith(last))
    names = vars(ppo_trainer) | given
    exec(textwrap.dedent("\n".join(lines[begin : end + 1])), names)
    return names


class Trl:
    """A batch of TRL's in float64: of each sample's tokens old, new and reference logprobs, old and new values."""

    def __init__(self, draw: Callable[[], Tensor], scores: Tensor, gamma: float, lam: float) -> None:
        self.values = draw()
        self.learned = draw().requires_grad_()
        self.logprobs = draw()
        self.ref_logprobs = draw()
        self.new_logprobs = (self.logprobs + 0.3 * draw()).requires_grad_()
        self.args = SimpleNamespace(
            kl_estimator="k1", kl_coef=0.05, whiten_rewards=False, gamma=gamma, lam=lam, vf_coef=0.1, cliprange=0.2
        )
        self.args.cliprange_value = CLIP_VALUE
        none = torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)
        ends = torch.full((SAMPLES,), TOKENS - 1)
        self.names: dict[str, Any] = {
            "args": self.args,
            "values": self.values,
            "logprobs": self.logprobs,
            "ref_logprobs": self.ref_logprobs,
            "responses": torch.zeros(SAMPLES, TOKENS),
            "sequence_lengths": ends,
            "sequence_lengths_p1": ends + 1,
            "padding_mask": none,
            "padding_mask_p1": none,
            "scores": scores,
        }
        self.names |= run_lines(*ADVANTAGES, self.names)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return the policy's and the value model's loss of one update."""
        batch = {
            "micro_batch_inds": torch.arange(SAMPLES),
            "mb_advantage": self.names["advantages"],
            "mb_logprobs": self.logprobs,
            "mb_return": self.names["returns"],
            "mb_values": self.values,
            "new_logprobs": self.new_logprobs,
            "vpred_temp": torch.nn.functional.pad(self.learned, (0, 1)).unsqueeze(-1),
            "context_length": 1,
        }
        names = run_lines(*LOSSES, self.names | batch)
        return names["pg_loss"], names["vf_loss"]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("max_tokens", [10_000, 40])
def test_an_update_is_trls(parallel: Parallel, gamma: float, lam: float, max_tokens: int) -> None:
    tree = PRESETS["ppo"].settings["algorithm"]
    algorithm = AlgorithmConfig.model_validate(tree | {"gamma": gamma, "lam": lam, "clip": {"low": 0.2, "high": 0.2}})
    update = draw_update([TOKENS] * SAMPLES, list(range(SAMPLES)), seed=0)
    generator = torch.Generator().manual_seed(1)
    trl = Trl(
        lambda: torch.randn(SAMPLES, TOKENS, generator=generator).double(), torch.tensor(update.rewards), gamma, lam
    )
    pg_loss, vf_loss = trl.losses()
    (pg_loss + vf_loss).backward()  # type: ignore[no-untyped-call]

    batches, _ = to_microbatches(update, algorithm, max_tokens)
    assert (len(batches) == 1) == (max_tokens == 10_000)
    batches = with_values(batches, [packed(trl.values, batch) for batch in batches])
    batches = [
        replace(b, old_logprobs=packed(trl.logprobs, b), reference_logprobs=packed(trl.ref_logprobs, b))
        for b in batches
    ]
    updates = with_generalized_advantages([batches], algorithm, trl.args.kl_coef, parallel)
    assert_rows(updates[0], "returns", trl.names["returns"])
    ((*whitened,),) = whiten(updates, parallel)
    assert_rows(whitened, "advantages", trl.names["advantages"])
    total_policy = 0.0
    total_value = 0.0
    for batch in whitened:
        new, values = (packed(of, batch).requires_grad_() for of in (trl.new_logprobs.detach(), trl.learned.detach()))
        policy_loss, _ = loss_of(algorithm)(new, torch.zeros_like(new), batch)
        value_loss, _ = make_value_loss(CLIP_VALUE)(values, batch)
        (policy_loss + value_loss).backward()
        total_policy = total_policy + policy_loss.item()
        total_value = total_value + value_loss.item()
        for gradient, expected in ((new.grad, trl.new_logprobs.grad), (values.grad, trl.learned.grad)):
            assert gradient is not None
            assert expected is not None
            close(torch.stack(gather_responses(gradient, batch)), expected[list(batch.sample_ids)])
    assert total_policy == pytest.approx(pg_loss.item(), abs=TOLERANCE)
    assert total_value == pytest.approx(vf_loss.item(), abs=TOLERANCE)


def packed(rows: Tensor, batch: Any) -> Tensor:
    """The tokens of a micro-batch, [T] in float64."""
    scattered = torch.zeros(len(batch.mask), dtype=torch.float64)
    scattered[batch.mask.bool()] = torch.cat([rows[i] for i in batch.sample_ids])
    return scattered


def assert_rows(batches: Any, name: str, expected: Tensor) -> None:
    for batch in batches:
        close(torch.stack(gather_responses(getattr(batch, name), batch)), expected[list(batch.sample_ids)])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE)
