"""Skipped updates: the samples of their step are kept, and the run stops after some in a row."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from grpo_mp.checkpoint.run_state import ROLLOUTS
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.rollout.journal import with_recorded_experts
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.context import TrainContext
from grpo_mp.trainer.job import PolicyContext
from grpo_mp.trainer.replay import FOLDER, RolloutShape, dump_step, step_file
from grpo_mp.trainer.step_logger import disk_may_be_full
from grpo_mp.utils.errors import EarlyStopError

NAMED = 3  # parameters in a sentence


def count_in_a_row(before: int, reports: Sequence[UpdateReport]) -> list[int]:
    """Return how many of the last updates were skipped, after each of a step's; `before`: before the first. Pure."""
    counts = accumulate(
        (report.skipped for report in reports), lambda n, skipped: n + 1 if skipped else 0, initial=before
    )
    return list(counts)[1:]


def keep_skipped(ctx: TrainContext, rollouts: RolloutBatch, reports: Sequence[UpdateReport], step: int) -> int:
    """Write the samples of a step with a skipped update, and return how many of the last updates were skipped.

    Raises EarlyStopError after `optimizer.max_skipped_updates` of them in a row. Every rank that trains must call this.
    """
    if not any(report.skipped for report in reports):
        return 0
    settings, parallel = ctx.settings, ctx.parallel
    folder = ctx.inputs.replay.folder if ctx.inputs.replay else settings.run.folder / FOLDER
    if not (settings.rollout.dump or ctx.inputs.replay):
        shape = RolloutShape.of(settings, ctx.inputs.hf)
        if settings.training.router_replay == "R3":
            rollouts = with_sent_experts(settings, rollouts, step)
        with disk_may_be_full(f"the rollouts of step {step}"):
            dump_step(folder, step, rollouts, shape, parallel.rank, parallel.world_size)
    return note_skipped(ctx, reports, step, step_file(folder, step, 0).parent)


def with_sent_experts(settings: Settings, rollouts: RolloutBatch, step: int) -> RolloutBatch:
    """Return what a step trains on with the experts that engines chose, of groups whose were sent to be replayed.

    They are those of the groups' records, which all ranks can read; a group whose disk was full has none.
    """
    steps = range(max(0, step - settings.rollout.max_staleness), step + 1)
    return replace(rollouts, groups=with_recorded_experts(rollouts.groups, settings.run.folder / ROLLOUTS, steps))


def note_skipped(ctx: PolicyContext, reports: Sequence[UpdateReport], step: int, kept: Path) -> int:
    """Warn of a step's skipped updates, and return how many of the last were. `kept`: where its samples are.

    Raises EarlyStopError after `optimizer.max_skipped_updates` of them in a row. Every rank that trains must call this.
    """
    counts = count_in_a_row(ctx.state.skipped_in_a_row, reports)
    names = all_gather([name for report in reports for name in report.bad_gradients], ctx.parallel.cpu_group)
    text = describe(step, max(counts), reports, sorted(set().union(*names)), kept)
    limit = ctx.settings.optimizer.max_skipped_updates
    if limit and max(counts) >= limit:
        raise EarlyStopError(f"{text}; the run stops after optimizer.max_skipped_updates={limit}: look at them")
    ctx.progress.note(f"warning: {text}")
    return counts[-1]


def note_skipped_by_critic(ctx: PolicyContext, reports: Sequence[UpdateReport], step: int) -> int:
    """Warn of a critic's skipped updates, and return how many of its last were.

    Raises EarlyStopError after `optimizer.max_skipped_updates` of them in a row.
    """
    if not any(report.skipped for report in reports):
        return 0
    counts = count_in_a_row(ctx.state.critic_skipped_in_a_row, reports)
    norms = ", ".join(f"{report.grad_norm:.3g}" for report in reports if report.skipped)
    text = f"step {step}: update of the critic skipped, {max(counts)} in a row: gradient norm {norms}: lower critic.lr"
    limit = ctx.settings.optimizer.max_skipped_updates
    if limit and max(counts) >= limit:
        raise EarlyStopError(f"{text}; the run stops after optimizer.max_skipped_updates={limit}")
    ctx.progress.note(f"warning: {text}")
    return counts[-1]


def describe(step: int, count: int, reports: Sequence[UpdateReport], names: Sequence[str], folder: Path) -> str:
    """Return one sentence about a step's skipped updates. `names`: parameters whose gradient was not finite. Pure."""
    norms = ", ".join(f"{report.grad_norm:.3g}" for report in reports if report.skipped)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    which = f", not finite in {', '.join(names[:NAMED])}{more}" if names else ""
    return f"step {step}: update skipped, {count} in a row: gradient norm {norms}{which}; its samples are in {folder}"
