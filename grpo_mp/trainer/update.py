"""Optimizer updates of a step, and the adaptive loss coefficients that follow from their metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat

from grpo_mp.algorithms.loss_metrics import compute_metrics
from grpo_mp.algorithms.losses import current_coefficients, make_loss, should_early_stop, update_adaptive_coefs
from grpo_mp.algorithms.policy_losses import PolicyLoss
from grpo_mp.algorithms.settings import AlgorithmConfig, KLConfig
from grpo_mp.algorithms.values import make_value_loss
from grpo_mp.config import CriticConfig
from grpo_mp.distributed.process_groups import sum_over_context
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.reference import Reference
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.metrics import mtp_metrics, reduce_report, reduce_value_losses, routing_metrics
from grpo_mp.utils.types import MicroBatch


def train_step(
    policy: Policy,
    updates: Sequence[Sequence[MicroBatch]],
    algorithm: AlgorithmConfig,
    epochs: int,
    adaptive_coefs: Mapping[str, float],
    policy_loss: PolicyLoss,
) -> tuple[list[UpdateReport], dict[str, float]]:
    """Run `epochs` passes over the step's updates, or fewer by early stop; return reports and adaptive coefficients.

    The adaptive loss coefficients change after every update that is not skipped.
    """
    reports = list[UpdateReport]()
    adaptive_coefs = dict(adaptive_coefs)
    reduce = partial(sum_over_context, parallel=policy.parallel)
    for update in chain.from_iterable(repeat(updates, epochs)):
        weights = current_coefficients(adaptive_coefs, algorithm)
        report = policy.update(update, make_loss(algorithm, weights, reduce, policy_loss))
        measured = compute_metrics(reduce_report(report, policy.parallel))
        measured |= routing_metrics(policy.replay, policy.parallel) | mtp_metrics(policy.mtp_loss, policy.parallel)
        measured |= policy.indexer_loss.take_metrics() if policy.indexer_loss else {}
        reports.append(replace(report, measured={**report.measured, **measured}))
        if not report.skipped:  # metrics of a skipped update may be NaN
            adaptive_coefs = update_adaptive_coefs(
                adaptive_coefs, measured.get("train/kl_loss", 0.0), measured["train/entropy"], algorithm
            )
        if should_early_stop(measured["train/ppo_kl"], algorithm.early_stop):
            break
    return reports, adaptive_coefs


def critic_step(
    critic: Critic, updates: Sequence[Sequence[MicroBatch]], settings: CriticConfig, epochs: int
) -> list[UpdateReport]:
    """Run `epochs` passes over the step's critic updates; return a report per update."""
    loss = make_value_loss(settings.cliprange_value)
    reports = list[UpdateReport]()
    for update in chain.from_iterable(repeat(updates, epochs)):
        report = critic.update(update, loss)
        reports.append(replace(report, measured={**report.measured, **reduce_value_losses(report, critic.parallel)}))
    return reports


def update_reference(reference: Reference | None, kl: KLConfig, step: int) -> bool:
    """If due, set the reference to mix x policy + (1 - mix) x reference, mix = kl.ref_update_mix; return if due."""
    if not (reference and kl.ref_update_every and step % kl.ref_update_every == 0):
        return False
    reference.update(kl.ref_update_mix)
    return True
