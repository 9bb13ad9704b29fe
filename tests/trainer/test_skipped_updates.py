"""A broken gradient changes nothing: weights, optimizer state and adaptive coefficients stay, and it is named."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.losses import load_policy_loss
from grpo_mp.batching.exchange import sample_infos
from grpo_mp.batching.routed_experts import experts_of_group, without_experts
from grpo_mp.checkpoint.run_state import ROLLOUTS, TrainState
from grpo_mp.config import load_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.dump import read_groups
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.replay import FOLDER, RolloutShape, dump_step, open_replay, step_file
from grpo_mp.trainer.skipped_updates import (
    count_in_a_row,
    describe,
    keep_skipped,
    note_skipped_by_critic,
    with_sent_experts,
)
from grpo_mp.trainer.update import train_step
from grpo_mp.utils.errors import EarlyStopError, UserError
from grpo_mp.utils.types import MicroBatch, Prompt, Sample, SampleGroup
from tests.conftest import TinyRun
from tests.trainer.one_step import OneStep
from tests.trainer.test_update import make_trainer, weights

ADAPTIVE = {"kl": 0.1}


def spoil(update: Sequence[MicroBatch], advantage: float = torch.nan) -> list[MicroBatch]:
    """Let the samples of one micro-batch have this advantage."""
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


def test_updates_in_a_row_are_counted_over_steps() -> None:
    reports = [UpdateReport([], 1.0, 0.1, skipped) for skipped in (True, False, True, True)]
    assert count_in_a_row(2, reports) == [3, 0, 1, 2]
    assert count_in_a_row(2, reports[1:2]) == [0]


@pytest.mark.parametrize("has_record", [True, False])
def test_what_is_kept_has_the_experts_that_were_sent_away(tiny_run: TinyRun, tmp_path: Path, has_record: bool) -> None:
    """Another rank's engine has recorded them a step before; without that record, a replay of them is refused."""
    settings = load_settings(tiny_run.config, ["schedule=async", "engine.ranks=1", "rollout.max_staleness=1"])
    run, training = settings.run.model_copy(update={"folder": tmp_path, "steps": 4}), settings.training
    training = training.model_copy(update={"router_replay": "R3"})
    settings = settings.model_copy(update={"run": run, "training": training})
    experts = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    last = Sample(40, 0, (1,), (2, 3), (-1.0, -2.0), (0, 0), False, routed_experts=experts + 8, state="completed")
    forked = replace(last, earlier=(replace(last, tokens=(4, 5), routed_experts=experts, part=1),))
    group = SampleGroup(Prompt(0, "?", (1,), epoch=3), (forked,))
    if has_record:
        GroupJournal(tmp_path / ROLLOUTS, 2).append(3, 40, group, RewardStats(), kept=True)
    infos = tuple(sample_infos(group))
    hf = HfConfig.read(settings.model.path)
    for rank, groups in enumerate(([], [without_experts(group)])):
        sent = RolloutBatch(groups, infos, infos, Counter(), RewardStats(), 0, 1.0, TrainState())
        kept = with_sent_experts(settings, sent, 4)
        dump_step(tmp_path / FOLDER, 4, kept, RolloutShape.of(settings, hf), rank, ranks=2)
    if has_record:
        open_replay(tmp_path / FOLDER, settings, hf, first=4)
        ((written, _),) = read_groups(step_file(tmp_path / FOLDER, 4, 1))
        assert {key: of.tolist() for key, of in experts_of_group(written).items()} == {
            (40, 0, 1): experts.tolist(),
            (40, 0): (experts + 8).tolist(),
        }
    else:
        with pytest.raises(UserError, match="step 4 has no routed experts to replay"):
            open_replay(tmp_path / FOLDER, settings, hf, first=4)


def group_of(group_id: int) -> SampleGroup:
    sample = Sample(group_id, 0, (1,), (2, 3), (-1.0, -2.0), (0, 0), False, state="completed")
    return SampleGroup(Prompt(0, "?", (1,)), (sample, replace(sample, index=1)))


@pytest.mark.parametrize("written_by", ["the skip", "rollout.dump", "the run that is replayed"])
def test_the_samples_of_a_skipped_update_are_kept_once_and_the_run_stops_after_some(
    tiny_run: TinyRun, parallel: Parallel, tmp_path: Path, written_by: str
) -> None:
    dumps = ["rollout.dump=true"] if written_by == "rollout.dump" else []
    limit = "optimizer.max_skipped_updates=3"
    settings = load_settings(tiny_run.config, [f"run.folder={tmp_path}", "run.steps=9", limit, *dumps])
    replay = SimpleNamespace(folder=tmp_path / "other") if written_by.startswith("the run") else None
    inputs, notes = SimpleNamespace(hf=HfConfig.read(settings.model.path), replay=replay), list[str]()
    ctx: Any = SimpleNamespace(settings=settings, inputs=inputs, parallel=parallel, state=TrainState())
    ctx.progress = SimpleNamespace(note=notes.append)
    groups = [group_of(7)]
    infos = tuple(sample_infos(groups[0]))
    batch = RolloutBatch(groups, infos, infos, Counter(), RewardStats(), 0, 1.0, TrainState())
    done, skipped = UpdateReport([], 1.0, 0.1, False), UpdateReport([], torch.nan, 0.1, True, bad_gradients=("a",))

    assert keep_skipped(ctx, batch, [done, done], 4) == 0
    assert (notes, list(tmp_path.iterdir())) == ([], [])
    assert keep_skipped(ctx, batch, [skipped, done, skipped], 5) == 1
    folder = (replay.folder if replay else tmp_path / FOLDER) / "step_000005"
    sentence = f"update skipped, 1 in a row: gradient norm nan, nan, not finite in a; its samples are in {folder}"
    assert notes == [f"warning: step 5: {sentence}"]
    assert folder.exists() == (written_by == "the skip")  # the others have written it before, or long ago
    if folder.exists():
        ((written, selected),) = read_groups(step_file(tmp_path / FOLDER, 5, 0))
        assert (selected, [one.tokens for one in written.samples]) == (True, [(2, 3)] * 2)

    ctx.state = replace(ctx.state, skipped_in_a_row=1)
    assert keep_skipped(ctx, batch, [skipped], 6) == 2
    assert keep_skipped(ctx, batch, [done], 6) == 0
    with pytest.raises(
        EarlyStopError, match=r"^step 7: update skipped, 3 in a row: .*max_skipped_updates=3: look at them$"
    ):
        keep_skipped(ctx, batch, [skipped, skipped], 7)


def test_a_critic_whose_updates_are_skipped_in_a_row_stops_the_run(tiny_run: TinyRun) -> None:
    settings, notes = load_settings(tiny_run.config, ["optimizer.max_skipped_updates=3"]), list[str]()
    ctx: Any = SimpleNamespace(settings=settings, state=TrainState(), progress=SimpleNamespace(note=notes.append))
    done, skipped = UpdateReport([], 1.0, 0.1, False), UpdateReport([], torch.nan, 0.1, True)
    assert note_skipped_by_critic(ctx, [done], 4) == 0
    assert note_skipped_by_critic(ctx, [skipped, done, skipped], 5) == 1
    sentence = "update of the critic skipped, 1 in a row: gradient norm nan, nan: lower critic.lr"
    assert notes == [f"warning: step 5: {sentence}"]
    ctx.state = replace(ctx.state, critic_skipped_in_a_row=1)
    with pytest.raises(
        EarlyStopError, match=r"^step 6: update of the critic skipped, 3 in a row: .*max_skipped_updates=3$"
    ):
        note_skipped_by_critic(ctx, [skipped, skipped], 6)


def test_the_sentence_names_norm_parameters_and_samples() -> None:
    reports = [UpdateReport([], norm, 0.1, norm != 1.0) for norm in (float("nan"), 1.0, 1234.5)]
    assert describe(7, 2, reports, ["a", "b", "c", "d"], Path("run/step_7")) == (
        "step 7: update skipped, 2 in a row: gradient norm nan, 1.23e+03, not finite in a, b, c and 1 more; its "
        "samples are in run/step_7"
    )
    assert "not finite" not in describe(7, 1, reports[1:], [], Path("run"))
