"""The updates of a step on a real policy of one rank: passes over the samples, which forward passes they cost.

A broken gradient changes nothing: weights, optimizer state and adaptive coefficients stay, and it is named.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mp.algorithms.losses import load_policy_loss
from grpo_mp.checkpoint.run_state import TrainState, checkpoint_folder, latest_checkpoint, write_manifest
from grpo_mp.config import Settings, load_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.job import build_policy
from grpo_mp.trainer.loop import PolicyContext
from grpo_mp.trainer.update import train_step
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.utils.types import MicroBatch, Prompt, Sample, SampleGroup
from tests.algorithms.objective import loss_of
from tests.conftest import TinyRun
from tests.save_policy import save_policy
from tests.trainer.one_step import OneStep, make_batch

SETTINGS = ("layout={}", "training.updates_per_step=2", "algorithm.kl.coef=0.0", "optimizer.warmup_updates=0")


def groups() -> list[SampleGroup]:
    generator = torch.Generator().manual_seed(0)

    def sample(group: int, index: int) -> Sample:
        length = 3 + index + group
        tokens = tuple(torch.randint(1, 90, (length,), generator=generator).tolist())
        logprobs = tuple((-4.0 - torch.rand(length, generator=generator)).tolist())
        return Sample(
            group, index, (5, 6, 7), tokens, logprobs, (0,) * length, truncated=False, reward=float(index % 3)
        )

    prompt = Prompt(0, "", (5, 6, 7))
    return [SampleGroup(prompt, tuple(sample(group, index) for index in range(4))) for group in range(4)]


def make_trainer(tiny_run: TinyRun, parallel: Parallel, *overrides: str) -> OneStep:
    settings = load_settings(tiny_run.config, [*SETTINGS, *overrides])
    policy = Policy(settings, parallel, with_reference=settings.algorithm.kl.coef > 0)
    return OneStep(settings, policy, make_batch(settings, parallel, groups()))


def weights(policy: Policy) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in policy.tensors.values()]


def test_epochs_reuse_samples_and_old_logprobs_of_the_first(tiny_run: TinyRun, parallel: Parallel) -> None:
    trainer = make_trainer(tiny_run, parallel, "training.epochs=2")
    updates = trainer.compute_logprobs()
    reports = trainer.train(updates)
    ratios = [report.measured["train/ratio/max"] for report in reports]
    assert len(reports) == 4
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)  # nothing has moved yet
    assert all(abs(ratio - 1) > 1e-4 for ratio in ratios[1:])

    by_hand = make_trainer(tiny_run, parallel, "training.epochs=2")
    first, second = by_hand.compute_logprobs()
    for update in (first, second, first, second):
        by_hand.policy.update(update, loss_of(by_hand.settings.algorithm))
    for ours, theirs in zip(weights(trainer.policy), weights(by_hand.policy), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (["algorithm.old_logprobs=engine"], False),
        (["algorithm.old_logprobs=engine", "algorithm.entropy.top_quantile=0.5"], True),
        (["algorithm=rloo", "algorithm.old_logprobs=engine"], False),
    ],
)
def test_old_logprobs_of_the_engine_cost_no_forward_pass(
    tiny_run: TinyRun, parallel: Parallel, overrides: list[str], passes: bool
) -> None:
    trainer = make_trainer(tiny_run, parallel, *overrides)
    forward_passes = 0

    def count(*_: Any) -> None:
        nonlocal forward_passes
        forward_passes += 1

    (model,) = trainer.policy.models()
    batches = sum(map(len, trainer.batch.updates))
    model.register_forward_pre_hook(count)
    updates = trainer.compute_logprobs()
    reference = batches if trainer.policy.reference else 0
    assert forward_passes == reference + (batches if passes else 0)
    assert trainer.settings.algorithm.needs_old_logprobs(2) is passes
    if trainer.policy.reference:  # the KL in the reward is that of the engine's own probabilities
        assert not torch.equal(updates[0][0].advantages, trainer.batch.updates[0][0].advantages)


def test_the_engine_s_logprobs_are_the_old_ones(tiny_run: TinyRun, parallel: Parallel) -> None:
    """The first update's ratios are the policy's over the engine's, written out from the policy's own logprobs."""
    trainer = make_trainer(tiny_run, parallel, "algorithm.old_logprobs=engine")
    update = trainer.compute_logprobs()[0]
    (outputs, *rest) = trainer.policy.logprobs(update)
    assert not rest
    mask = update[0].mask.bool()
    ratios = (outputs[0][mask].double() - update[0].rollout_logprobs[mask].double()).exp()
    report = trainer.train([update])[0]
    assert report.measured["train/ratio/mean"] == pytest.approx(float(ratios.mean()), rel=1e-5)


def test_shuffled_samples_are_spread_over_the_updates_alike_on_every_rank(
    tiny_run: TinyRun, parallel: Parallel
) -> None:
    shuffled = make_trainer(tiny_run, parallel, "training.shuffle=true")

    def parts(step: int, settings: Settings) -> list[set[int]]:
        batch = make_batch(settings, parallel, groups(), step)
        return [set(update.samples) for update in batch.plan]

    in_order = shuffled.settings.model_copy(
        update={"training": shuffled.settings.training.model_copy(update={"shuffle": False})}
    )
    assert parts(1, in_order) == [set(range(8)), set(range(8, 16))]
    assert parts(1, shuffled.settings) == parts(1, shuffled.settings) != parts(2, shuffled.settings)
    for step in range(1, 5):
        first, second = parts(step, shuffled.settings)
        assert len(first) == len(second) == 8
        assert first | second == set(range(16))


def test_a_resumed_run_has_the_weights_of_its_checkpoint(parallel: Parallel, tiny_run: TinyRun, tmp_path: Path) -> None:
    settings = load_settings(tiny_run.config, [*SETTINGS, f"run.folder={tmp_path}"])
    assert latest_checkpoint(settings.run.folder) is None
    policy = build_policy(settings, parallel, TrainState(), None, settings.algorithm.kl.coef > 0)
    with torch.no_grad():
        for tensor in policy.tensors.values():
            tensor.mul_(1.5)
    for step in (2, 3):  # the weights of the second are those of the first, doubled
        folder = checkpoint_folder(tmp_path, step)
        (folder / "policy").mkdir(parents=True)
        save_policy(policy, folder / "policy")
        write_manifest(folder, TrainState(step=step))
        saved = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
        checkpoint = latest_checkpoint(settings.run.folder)
        with_reference = settings.algorithm.kl.coef > 0
        resumed = build_policy(settings, parallel, TrainState(step=step), checkpoint, with_reference)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.tensors.items())
        with torch.no_grad():
            for tensor in policy.tensors.values():
                tensor.mul_(2.0)


ADAPTIVE = {"kl": 0.1}


def spoil(update: Sequence[MicroBatch], advantage: float = torch.nan) -> list[MicroBatch]:
    """Set the advantage of the samples in one micro-batch."""
    first, *rest = update
    return [replace(first, advantages=torch.full_like(first.advantages, advantage)), *rest]


def train(trainer: OneStep, updates: Sequence[Sequence[MicroBatch]]) -> tuple[list[UpdateReport], dict[str, float]]:
    algorithm = trainer.settings.algorithm
    return train_step(trainer.policy, updates, algorithm, 1, ADAPTIVE, load_policy_loss(algorithm))


def test_a_gradient_that_is_no_number_is_left_out(tiny_run: TinyRun, parallel: Parallel) -> None:
    """The run goes on as one that never met it, bit for bit."""
    settings = ("algorithm.kl.coef=0.1", "algorithm.kl.target=0.05", "optimizer.lr_schedule=constant")
    trainer, undisturbed = (make_trainer(tiny_run, parallel, *settings) for _ in range(2))
    first, second = trainer.compute_logprobs()
    before = weights(trainer.policy)
    reports, coefs = train(trainer, [spoil(first)])
    assert [(report.skipped, report.grad_norm == report.grad_norm) for report in reports] == [(True, False)]
    assert set(reports[0].bad_gradients) <= set(trainer.policy.tensors)
    assert len(reports[0].bad_gradients) > 10
    assert coefs == ADAPTIVE
    assert all(map(torch.equal, before, weights(trainer.policy)))

    done, coefs = train(trainer, [second])
    theirs, their_coefs = train(undisturbed, [undisturbed.compute_logprobs()[1]])
    assert (done[0].skipped, done[0].grad_norm, done[0].bad_gradients) == (False, theirs[0].grad_norm, ())
    assert coefs == their_coefs != ADAPTIVE
    assert not all(map(torch.equal, before, weights(trainer.policy)))
    assert all(map(torch.equal, weights(undisturbed.policy), weights(trainer.policy)))


def test_a_norm_that_overflows_is_left_out(tiny_run: TinyRun, parallel: Parallel) -> None:
    """Each number of the gradient is finite; clipping by an infinite norm would make it 0, and Adam still step."""
    trainer = make_trainer(tiny_run, parallel)
    before = weights(trainer.policy)
    (report,), _ = train(trainer, [spoil(trainer.compute_logprobs()[0], 1e30)])
    assert (report.skipped, report.grad_norm, len(report.bad_gradients)) == (True, float("inf"), 0)
    assert all(map(torch.equal, before, weights(trainer.policy)))


def test_a_norm_above_the_limit_is_left_out(tiny_run: TinyRun, parallel: Parallel) -> None:
    """The limit is that of the norm before clipping, to the last bit."""
    free = make_trainer(tiny_run, parallel, "optimizer.clip_grad=0.001")
    norm = train(free, free.compute_logprobs()[:1])[0][0].grad_norm
    for limit, skipped in ((norm, False), (norm * (1 - 1e-6), True)):
        trainer = make_trainer(tiny_run, parallel, "optimizer.clip_grad=0.001", f"optimizer.skip_grad_norm={limit!r}")
        before = weights(trainer.policy)
        (report,), _ = train(trainer, trainer.compute_logprobs()[:1])
        assert (report.skipped, report.grad_norm, len(report.bad_gradients)) == (skipped, norm, 0)
        assert all(map(torch.equal, before, weights(trainer.policy))) is skipped


@pytest.mark.parametrize("model", ["", "critic"])
def test_skipped_updates_in_a_row_stop_the_run(parallel: Parallel, model: str) -> None:
    notes = list[str]()
    ctx: Any = SimpleNamespace(parallel=parallel, progress=SimpleNamespace(note=notes.append))
    ctx.state = TrainState()
    done = UpdateReport([], 1.0, 0.1, False)
    skipped = UpdateReport([], torch.nan, 0.1, True, bad_gradients=("a",))
    assert PolicyContext.note_skipped(ctx, [done, done], 4, model) == 0
    assert PolicyContext.note_skipped(ctx, [skipped, done, skipped], 5, model) == 1
    sentence = "skipped, 1 in a row: gradient norm nan, nan, not finite in a"
    assert notes == [f"warning: step 5: update{' of the critic' if model else ''} {sentence}"]
    ctx.state = replace(ctx.state, **{f"{'critic_' if model else ''}skipped_in_a_row": 1})
    assert PolicyContext.note_skipped(ctx, [skipped], 6, model) == 2
    with pytest.raises(EarlyStopError, match=r"^step 7: .* 3 in a row: .* after 3 skipped updates: "):
        PolicyContext.note_skipped(ctx, [skipped, skipped], 7, model)
