"""The optimizer updates of a step, and the controls that follow from what they measure."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

from grpo_mp.algorithms.controllers import current_coefficients, has_drifted, update_controls
from grpo_mp.algorithms.losses import make_loss
from grpo_mp.algorithms.report import metrics
from grpo_mp.distributed.process_groups import context_reduction
from grpo_mp.policy.policy import UpdateReport
from grpo_mp.trainer.context import TrainContext
from grpo_mp.trainer.metrics import reduce_report
from grpo_mp.types import MicroBatch


def train_step(session: TrainContext, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateReport]:
    """Update the policy, `optimizer.epochs` times over the step's parts, unless it drifts too far from its samples.

    Adaptive weights move after every update. Every rank must call this.
    """
    wanted, reports = session.settings.algorithm, list[UpdateReport]()
    for update in chain.from_iterable(repeat(updates, session.settings.optimizer.epochs)):
        weights = current_coefficients(session.state.controls, wanted)
        report = session.policy.update(update, make_loss(wanted, weights, context_reduction(session.parallel)))
        measured = metrics(reduce_report(report, session.parallel))
        reports.append(replace(report, measured=measured))
        kl = measured.get("train/kl_loss", 0.0)
        controls = update_controls(session.state.controls, kl, measured["train/entropy"], wanted)
        session.state = replace(session.state, controls=controls)
        if has_drifted(measured["train/ppo_kl"], measured["train/effective_samples"], wanted.drift):
            break
    return reports


def refresh_reference(session: TrainContext) -> None:
    """Where it is due, the reference takes a share of the policy: mix x policy + (1 - mix) x reference."""
    wanted, reference = session.settings.algorithm.kl, session.policy.reference
    if reference and wanted.refresh_every and session.state.step % wanted.refresh_every == 0:
        reference.refresh(wanted.refresh_mix)
        session.state = replace(session.state, reference_refreshed=True)
