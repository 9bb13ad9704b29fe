"""A broken gradient changes nothing: weights, optimizer state and adaptive coefficients stay, and it is named."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mp.algorithms.losses import load_policy_loss
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.loop import PolicyContext
from grpo_mp.trainer.update import train_step
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.utils.types import MicroBatch
from tests.conftest import TinyRun
from tests.trainer.one_step import OneStep
from tests.trainer.test_update import make_trainer, weights

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
    done, skipped = UpdateReport([], 1.0, 0.1, False), UpdateReport([], torch.nan, 0.1, True, bad_gradients=("a",))
    assert PolicyContext.note_skipped(ctx, [done, done], 4, model) == 0
    assert PolicyContext.note_skipped(ctx, [skipped, done, skipped], 5, model) == 1
    sentence = "skipped, 1 in a row: gradient norm nan, nan, not finite in a"
    assert notes == [f"warning: step 5: update{' of the critic' if model else ''} {sentence}"]
    ctx.state = replace(ctx.state, **{f"{'critic_' if model else ''}skipped_in_a_row": 1})
    assert PolicyContext.note_skipped(ctx, [skipped], 6, model) == 2
    with pytest.raises(EarlyStopError, match=r"^step 7: .* 3 in a row: .* after 3 skipped updates: "):
        PolicyContext.note_skipped(ctx, [skipped, skipped], 7, model)
