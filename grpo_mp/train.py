"""The GRPO loop, and PPO's. `torchrun ... -m grpo_mp.train CONFIG section.key=value ...`; `--dry-run` only checks."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from grpo_mp.utils.processes import end_with_launcher

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the seconds of imports without a trace
    end_with_launcher()

from grpo_mp import platform
from grpo_mp.batching.step_batch import Assembly, StepBatch, UpdateBatches, assemble_step_batch, send_routed_experts
from grpo_mp.checkpoint.run_state import FINAL, METRICS, resumable_checkpoints
from grpo_mp.config import Settings, load_settings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.monitor.loggers import open_loggers
from grpo_mp.monitor.reporter import Reporter
from grpo_mp.monitor.rules import RuleWatch
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.monitor.samples import SHOWN_SAMPLES, drop_later_files
from grpo_mp.monitor.timeline import merge_traces
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.command_line import command, print_once, started_job
from grpo_mp.trainer.context import RolloutContext, TrainContext, open_context
from grpo_mp.trainer.describe import describe_run
from grpo_mp.trainer.evaluation import Evaluation, recorded_evaluations
from grpo_mp.trainer.logprobs import compute_logprobs
from grpo_mp.trainer.loop import (
    end_report,
    export,
    export_step,
    finish_report,
    finish_save,
    is_due,
    make_guards,
    make_reporter,
    note_skipped,
    save,
    save_last,
    sync_weights,
)
from grpo_mp.trainer.preflight import RunInputs, run_preflight, run_replay_preflight
from grpo_mp.trainer.replay import FOLDER, RolloutShape, dump_step, replay_settings
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.trainer.step_logger import StepLogger, StepRecord, disk_may_be_full
from grpo_mp.trainer.update import critic_step, train_step, update_reference
from grpo_mp.utils.parsers import train_parser
from grpo_mp.utils.phases import Phase


def train(ctx: TrainContext, reporter: Reporter) -> None:
    """Run GRPO: generate groups, score them, turn rewards into advantages, update the policy, sync the engines.

    PPO's critic, where there is one, estimates the advantages of tokens and is updated beside the policy.
    """
    run, logger = ctx.settings.run, make_logger(ctx)
    synced = sync_first_weights(ctx)
    first, last = first_evaluation(ctx)
    if ctx.state.step == 0:
        logger.write(0, StepRecord(first.metrics | synced, texts=first.texts))
        logger.write_scores(0, first.scores, first)
    first_step, guards = ctx.state.step, make_guards(ctx)
    while ctx.state.step < run.steps and not ctx.should_stop():
        step = ctx.state.step + 1
        logger.begin_step()

        rollouts = ctx.collector.collect(ctx.state, step)  # generate and score
        if ctx.should_stop():
            break  # the step is repeated after a restart
        dump_rollouts(ctx, rollouts, step)
        batch = compute_advantages(ctx, rollouts, step)
        updates = compute_logprobs_and_values(ctx, batch)
        critic_reports = update_critic(ctx, updates, step)  # none without a critic
        reports = update_policy(ctx, rollouts, updates, step)
        synced = sync_weights(ctx, rollouts)

        record = logger.step_record(
            ctx.state,
            rollouts,
            batch=batch,
            updates=updates,
            reports=reports,
            critic_reports=critic_reports,
            synced=synced,
        )
        if is_due(step, run.eval_every, run.steps):
            last = ctx.evaluator.evaluate(step)
            record.scalars.update(last.metrics)
            record.texts.update(last.texts)
            logger.write_scores(step, first.scores, last)
        logger.write(step, record)
        ctx.progress.step(step, record.scalars, record.scalars.get("rollout/accuracy"))
        reporter.step(step)
        guards.check(step, record.scalars)
        if run.export_every and step % run.export_every == 0:
            export_step(ctx, step)  # before the save: what a start resumes behind is there
        if is_due(step, run.save_every, run.steps):
            save(ctx, logger, last=step == run.steps)
    end_report(ctx, reporter)
    save_last(ctx, logger, first_step)
    logger.close()
    keep_rollouts(ctx)
    finish(ctx, first, last)
    finish_report(ctx, reporter)


def generate(ctx: RolloutContext) -> None:
    """Follow `train` as a rank that only hosts an engine: generate for the next step while this one trains."""
    run = ctx.settings.run
    sync_first_weights(ctx)
    first_evaluation(ctx)
    while ctx.state.step < run.steps and not ctx.should_stop():
        step = ctx.state.step + 1
        rollouts = ctx.collector.collect(ctx.state, step)
        if ctx.should_stop():
            break
        dump_rollouts(ctx, rollouts, step)
        send_experts(ctx, rollouts, step)
        sync_weights(ctx, rollouts)
        if is_due(step, run.eval_every, run.steps):
            ctx.evaluator.evaluate(step)
    keep_rollouts(ctx)


def first_evaluation(ctx: RolloutContext) -> tuple[Evaluation, Evaluation]:
    """Evaluate before training, and return that as the first and the last evaluation so far.

    A run that resumes has both in its folder, without answers; one that is asked to stop has none yet. Every rank must
    call this.
    """
    if ctx.should_stop():
        return Evaluation(), Evaluation()
    if recorded := recorded_evaluations(ctx.settings.run.folder, ctx.state.step, ctx.job):
        return recorded
    first = ctx.evaluator.evaluate(ctx.state.step)
    return first, first


def make_logger(ctx: TrainContext) -> StepLogger:
    """Open the loggers of the run, which continue after the steps that are done; lines of later steps are dropped."""
    settings, first_step = ctx.settings, ctx.state.step + 1 if ctx.state.step else 0
    folder = settings.run.folder
    make_loggers = ctx.inputs.extensions.make_loggers if ctx.parallel.rank == 0 else ()
    if ctx.parallel.rank == 0:
        drop_later_files(folder, first_step)
    loggers, watch = open_loggers(make_loggers, folder, first_step, settings.model_dump(mode="json")), RuleWatch()
    for line in read_metrics(folder / METRICS) if ctx.parallel.rank == 0 else ():
        watch.step(line)
    return StepLogger(
        folder,
        settings.training.epochs,
        samples_per_step=SHOWN_SAMPLES,
        parallel=ctx.parallel,
        timeline=ctx.timeline,
        progress=ctx.progress,
        loggers=loggers,
        memory_tracker=ctx.phases.memory_tracker,
        expert_load=ctx.policy.expert_load,
        watch=watch,
        distillation=settings.algorithm.distillation,
    )


def dump_rollouts(ctx: RolloutContext, rollouts: RolloutBatch, step: int) -> None:
    """Write what the step trains on where `rollout.dump` says so."""
    if ctx.settings.rollout.dump and not ctx.inputs.replay:
        with ctx.phases.phase(Phase.SCORE, "dump"):
            folder, shape = ctx.settings.run.folder / FOLDER, RolloutShape.of(ctx.settings, ctx.inputs.hf)
            own = replace(rollouts, groups=rollouts.of_own_engine)
            with disk_may_be_full(f"the rollouts of step {step}"):
                dump_step(folder, step, batch=own, shape=shape, rank=ctx.job.rank, ranks=ctx.job.world_size)


def send_experts(ctx: RolloutContext, rollouts: RolloutBatch, step: int) -> None:
    """Send the experts that the engine chose to the ranks that replay them, which assemble their batch meanwhile."""
    with ctx.phases.phase(Phase.SCORE):
        hidden_size = model_shape(ctx.inputs.hf).hidden_size
        send_routed_experts(
            rollouts.of_own_engine,
            rollouts.infos,
            settings=ctx.settings,
            job=ctx.job,
            hidden_size=hidden_size,
            step=step,
        )


def compute_advantages(ctx: TrainContext, rollouts: RolloutBatch, step: int) -> StepBatch:
    """Turn rewards into advantages, and bring samples to the ranks that train on them, packed in micro-batches."""
    assembly = Assembly(
        ctx.settings,
        ctx.parallel,
        hidden_size=ctx.policy.config.hidden_size,
        estimator=ctx.inputs.extensions.estimator,
        reward_weights=ctx.settings.reward.weights,
        moe_layers=ctx.policy.moe_layers,
    )
    with ctx.phases.phase(Phase.SCORE):
        return assemble_step_batch(rollouts.groups, rollouts.infos, step, assembly)


def compute_logprobs_and_values(ctx: TrainContext, batch: StepBatch) -> UpdateBatches:
    """Return the micro-batches of each update with the logprobs, and values of a critic, that its loss needs."""
    settings, state = ctx.settings, ctx.state
    with ctx.phases.phase(Phase.LOGPROB):
        return compute_logprobs(
            ctx.policy,
            batch,
            algorithm=settings.algorithm,
            epochs=settings.training.epochs,
            adaptive_coefs=state.adaptive_coefs,
            record_routing=settings.training.router_replay == "R2",
            critic=ctx.critic,
        )


def update_critic(ctx: TrainContext, updates: UpdateBatches, step: int) -> list[UpdateReport]:
    """Let the critic learn the step's returns."""
    if not (ctx.critic and ctx.settings.critic):
        return []
    finish_save(ctx)  # it reads weights and the optimizer's state
    replicas_every = ctx.settings.monitor.check_replicas_every
    with ctx.phases.phase(Phase.TRAIN, "critic"):
        if replicas_every and step % replicas_every == 0:
            check_replicas(ctx.critic, step)
        reports = critic_step(ctx.critic, updates, ctx.settings.critic, ctx.settings.training.epochs)
    ctx.state = replace(ctx.state, critic_skipped_in_a_row=note_skipped(ctx, reports, step, "critic"))
    return reports


def update_policy(ctx: TrainContext, rollouts: RolloutBatch, updates: UpdateBatches, step: int) -> list[UpdateReport]:
    """Make the step's optimizer updates, refresh the reference where that is due, and advance the state."""
    finish_save(ctx)  # it reads weights and the optimizer's state
    algorithm, epochs = ctx.settings.algorithm, ctx.settings.training.epochs
    policy_loss = ctx.inputs.extensions.policy_loss
    replicas_every = ctx.settings.monitor.check_replicas_every
    with ctx.phases.phase(Phase.TRAIN):
        if replicas_every and step % replicas_every == 0:
            check_replicas(ctx.policy, step)
        ctx.recovery.keep_weights()
        warms_up = ctx.settings.critic is not None and step <= ctx.settings.critic.warmup_steps
        reports, adaptive_coefs = train_step(
            ctx.policy,
            () if warms_up else updates,
            algorithm=algorithm,
            epochs=epochs,
            adaptive_coefs=ctx.state.adaptive_coefs,
            policy_loss=policy_loss,
        )
        skipped_in_a_row = note_skipped(ctx, reports, step)
        updated = update_reference(ctx.policy.reference, algorithm.kl, step)
    state = rollouts.state  # cursor and curriculum are those that the rollouts left
    ctx.state = replace(
        state,
        step=step,
        optimizer_step=state.optimizer_step + len(reports),
        samples_seen=state.samples_seen + len(rollouts.infos),
        adaptive_coefs=adaptive_coefs,
        reference_updated=state.reference_updated or updated,
        skipped_in_a_row=skipped_in_a_row,
        critic_skipped_in_a_row=ctx.state.critic_skipped_in_a_row,
    )
    return reports


def sync_first_weights(ctx: RolloutContext) -> dict[str, float]:
    """Push the weights that the run begins with, unless it was asked to stop while it started."""
    return {} if ctx.should_stop() else sync_weights(ctx)


def keep_rollouts(ctx: RolloutContext) -> None:
    """Keep what was generated for later steps where the run is stopped before them."""
    if ctx.state.step < ctx.settings.run.steps:
        with ctx.phases.phase(Phase.SAVE, "rollouts"):
            ctx.collector.stop()


def finish(ctx: TrainContext, first: Evaluation, last: Evaluation) -> None:
    """Export the Hugging Face folder, merge the traces, and show the first and the last evaluation."""
    settings = ctx.settings
    if ctx.state.step < settings.run.steps:
        ctx.progress.note(f"stopped after step {ctx.state.step}: run the same command to resume")
        return
    if settings.run.export:
        export(ctx, settings.run.folder / FINAL)
    if ctx.parallel.rank == 0:
        merge_traces(settings.run.folder)
        ctx.progress.finish(first.scores, last.scores)


def run(settings: Settings, inputs: RunInputs) -> None:
    """Train as one rank of a started job. Raises UserError for what a user can fix."""
    checkpoints = partial(resumable_checkpoints, settings.run.folder, inputs.train.digest)
    with open_context(settings, inputs, checkpoints) as ctx:
        if isinstance(ctx, TrainContext):
            with make_reporter(ctx) as reporter:
                train(ctx, reporter)
        else:
            generate(ctx)


def main(arguments: Sequence[str] | None = None, run: Callable[[Settings, RunInputs], None] = run) -> None:
    """Run the command line, see `grpo-mp train --help`. Raises SystemExit where it fails."""
    with (
        command(train_parser(), arguments) as args,
        started_job(args.ranks, args.dry_run, args.ranks_per_node) as (world_size, ranks_per_node),
    ):
        settings = load_settings(args.config, args.overrides, dtype=platform.default_dtype())
        if args.replay:
            settings = replay_settings(settings)
            inputs = run_replay_preflight(args.replay, settings, world_size)
        else:
            inputs = run_preflight(settings, world_size, ranks_per_node)
        settings = settings.with_steps(inputs.train.epoch_size)
        if args.dry_run:
            print_once(describe_run(settings, inputs, world_size, ranks_per_node, args.all))
        else:
            run(settings, inputs)


if __name__ == "__main__":
    main()
