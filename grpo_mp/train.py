"""Train with GRPO or PPO: `torchrun ... -m grpo_mp.train CONFIG section.key=value ...`; `--dry-run` only checks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from grpo_mp.utils.processes import begin_slow_imports

if __name__ == "__main__":
    begin_slow_imports()

from grpo_mp import platform
from grpo_mp.batching.step_batch import Assembly, StepBatch, UpdateBatches, assemble_step_batch, send_routed_experts
from grpo_mp.batching.updates import StepRule, packing_rule
from grpo_mp.checkpoint.run_state import ROLLOUTS, check_same_data, resumable_checkpoints
from grpo_mp.config import Settings, dump_settings, load_settings, show_settings
from grpo_mp.data.self_teacher import SelfTeacher
from grpo_mp.data.template import ChatRenderer
from grpo_mp.distributed.coordinates import data_parallel_size
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.process_groups import broadcast
from grpo_mp.evaluate import open_engines
from grpo_mp.monitor.evaluation import read_scores, step_file
from grpo_mp.monitor.samples import SHOWN_SAMPLES
from grpo_mp.policy.critic import check_critic
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.rollout.reward_servers import check_served_models, served_models
from grpo_mp.rollout.routed_experts import check_replayed_keys, recorded_shape
from grpo_mp.trainer.collect import RolloutBatch, RolloutCollector
from grpo_mp.trainer.command_line import command, print_once, started_job
from grpo_mp.trainer.describe import describe_engines, describe_prompts, describe_ranks, dry_run_text
from grpo_mp.trainer.engines import Engines
from grpo_mp.trainer.evaluation import Evaluator
from grpo_mp.trainer.exit import PreemptionHandler
from grpo_mp.trainer.job import RunContext
from grpo_mp.trainer.logprobs import compute_logprobs
from grpo_mp.trainer.loop import PolicyContext, is_due
from grpo_mp.trainer.preflight import (
    REQUEST_TOKENS,
    RunInputs,
    check_bucket,
    check_critic_tokenizer,
    check_engines,
    check_export,
    check_place,
    data_warnings,
    load_extensions,
    make_scorer,
    make_teachers,
    read_model,
    read_prompts,
    replay_inputs,
    sent_formats,
    start_warnings,
)
from grpo_mp.trainer.recorded import read_recorded
from grpo_mp.trainer.recover import EngineRecovery
from grpo_mp.trainer.replay import FOLDER, ReplayCollector, dump_step
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.trainer.save import CheckpointSaver
from grpo_mp.trainer.step_logger import StepLogger, StepOutcome, StepRecord, sync_metrics
from grpo_mp.trainer.update import critic_step, train_step, update_reference
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.parsers import train_parser
from grpo_mp.utils.phases import Phase


@dataclass(kw_only=True)
class RolloutContext(RunContext):
    """Parts of an RL job that every rank has, including ranks that only host an engine."""

    settings: Settings
    inputs: RunInputs
    collector: RolloutCollector | ReplayCollector
    evaluator: Evaluator
    recovery: EngineRecovery


@dataclass(kw_only=True)
class TrainContext(RolloutContext, PolicyContext):
    """Context of a training rank in an RL job: adds policy, critic and checkpoint saver to `RolloutContext`."""


def train(ctx: TrainContext) -> None:
    """Run GRPO: generate groups, score them, turn rewards into advantages, update the policy, sync the engines.

    With a critic (PPO), token advantages are computed from its values, and each step updates the critic first.
    """
    run = ctx.settings.run
    logger = open_logger(ctx)
    record = StepRecord(sync_first_weights(ctx))
    if ctx.state.step == 0:
        if not ctx.should_stop():
            evaluate(ctx, logger, record, step=0)
        logger.write(0, record)
    with ctx.reporting(logger):
        for step in ctx.steps():
            rollouts = ctx.collector.collect(ctx.state, step)  # generate and score
            if ctx.should_stop():
                break  # a resumed run repeats this step
            dump_rollouts(ctx, rollouts, step)
            batch = compute_advantages(ctx, rollouts, step)
            updates = compute_logprobs_and_values(ctx, batch)
            critic_reports = update_critic(ctx, updates, step)  # empty without a critic
            reports = update_policy(ctx, rollouts, updates, step)
            synced = sync_weights(ctx)

            outcome = StepOutcome(ctx.state, rollouts, batch, updates, reports, critic_reports, synced)
            record = logger.step_record(outcome)
            if is_due(step, run.eval_every, run):
                evaluate(ctx, logger, record, step)
            ctx.end_step(step, record, record.scalars.get("rollout/accuracy"))
        ctx.end()
        keep_rollouts(ctx)
        if ctx.finish() and ctx.parallel.rank == 0:
            show_scores(ctx)


def generate(ctx: RolloutContext) -> None:
    """Run the loop of an engine-only rank: generate the groups of the next step while training ranks train."""
    run = ctx.settings.run
    sync_first_weights(ctx)
    if ctx.state.step == 0 and not ctx.should_stop():
        ctx.evaluator.evaluate(0)
    while ctx.state.step < run.steps and not ctx.should_stop():
        step = ctx.state.step + 1
        rollouts = ctx.collector.collect(ctx.state, step)
        if ctx.should_stop():
            break
        dump_rollouts(ctx, rollouts, step)
        send_experts(ctx, rollouts, step)
        sync_weights(ctx)
        if is_due(step, run.eval_every, run):
            ctx.evaluator.evaluate(step)
    keep_rollouts(ctx)


def open_logger(ctx: TrainContext) -> StepLogger:
    """Open the loggers of the run; a resumed run appends to the records of its finished steps."""
    settings = ctx.settings
    return ctx.open_logger(
        settings.model_dump(mode="json"),
        ctx.inputs.extensions.make_loggers,
        epochs=settings.training.epochs,
        samples_per_step=SHOWN_SAMPLES,
        distillation=settings.algorithm.distillation,
    )


def evaluate(ctx: TrainContext, logger: StepLogger, record: StepRecord, step: int) -> None:
    """Evaluate the engines' weights on every eval set, write the scores, and add them to `record`."""
    evaluation = ctx.evaluator.evaluate(step)
    record.scalars.update(evaluation.metrics)
    record.texts.update(evaluation.texts)
    logger.write_scores(step, evaluation)


def dump_rollouts(ctx: RolloutContext, rollouts: RolloutBatch, step: int) -> None:
    """Write the step's groups to the dump folder if `rollout.dump` is set."""
    if ctx.settings.rollout.dump and not ctx.inputs.replay:
        with ctx.phases.phase(Phase.SCORE, "dump"):
            own = replace(rollouts, groups=rollouts.of_own_engine)
            dump_step(ctx.settings.run.folder / FOLDER, step, own, rank=ctx.job.rank, ranks=ctx.job.world_size)


def send_experts(ctx: RolloutContext, rollouts: RolloutBatch, step: int) -> None:
    """Send the routed experts recorded by this rank's engine to the training ranks that replay them (R3)."""
    if ctx.inputs.recorded:
        with ctx.phases.phase(Phase.SCORE):
            send_routed_experts(rollouts.of_own_engine, rollouts.infos, step_rule(ctx), step=step, job=ctx.job)


def step_rule(ctx: RolloutContext) -> StepRule:
    """Return the rule by which samples are divided into updates and micro-batches."""
    settings = ctx.settings
    job = ctx.job
    dp_size = data_parallel_size(settings.layout, job.world_size - job.engine_ranks)
    hidden_size = model_shape(ctx.inputs.hf).hidden_size
    with_mtp = settings.model.trains_mtp
    packing = packing_rule(settings.layout, settings.training, dp_size, hidden_size=hidden_size, with_mtp=with_mtp)
    return StepRule(packing, settings.training, settings.run.seed)


def compute_advantages(ctx: TrainContext, rollouts: RolloutBatch, step: int) -> StepBatch:
    """Compute advantages from rewards, exchange samples between ranks, and pack this rank's micro-batches."""
    assembly = Assembly(
        step_rule(ctx),
        ctx.settings.algorithm,
        ctx.settings.rollout,
        ctx.parallel,
        estimator=ctx.inputs.extensions.estimator,
        reward_weights=ctx.settings.reward.weights,
        moe_layers=ctx.policy.moe_layers,
        key_layers=ctx.policy.key_layers,
    )
    with ctx.phases.phase(Phase.SCORE):
        return assemble_step_batch(rollouts.groups, rollouts.infos, step, assembly)


def compute_logprobs_and_values(ctx: TrainContext, batch: StepBatch) -> UpdateBatches:
    """Return the micro-batches of each update, with old and reference logprobs and critic values as the loss needs."""
    settings = ctx.settings
    state = ctx.state
    with ctx.phases.phase(Phase.LOGPROB):
        return compute_logprobs(
            ctx.policy,
            batch,
            algorithm=settings.algorithm,
            training=settings.training,
            adaptive_coefs=state.adaptive_coefs,
            critic=ctx.critic,
        )


def update_critic(ctx: TrainContext, updates: UpdateBatches, step: int) -> list[UpdateReport]:
    """Train the critic on the step's returns; return a report per update, none without a critic."""
    if not (ctx.critic and ctx.settings.critic):
        return []
    ctx.finish_save()
    with ctx.phases.phase(Phase.TRAIN, "critic"):
        check_replicas(ctx.critic, step)
        reports = critic_step(ctx.critic, updates, ctx.settings.critic, ctx.settings.training.epochs)
    ctx.state = replace(ctx.state, critic_skipped_in_a_row=ctx.note_skipped(reports, step, "critic"))
    return reports


def update_policy(ctx: TrainContext, rollouts: RolloutBatch, updates: UpdateBatches, step: int) -> list[UpdateReport]:
    """Run the step's optimizer updates, refresh the reference model when due, and advance `ctx.state`."""
    ctx.finish_save()
    algorithm = ctx.settings.algorithm
    epochs = ctx.settings.training.epochs
    with ctx.phases.phase(Phase.TRAIN):
        check_replicas(ctx.policy, step)
        ctx.recovery.keep_weights()
        warms_up = ctx.settings.critic is not None and step <= ctx.settings.critic.warmup_steps
        reports, adaptive_coefs = train_step(
            ctx.policy,
            () if warms_up else updates,
            algorithm=algorithm,
            epochs=epochs,
            adaptive_coefs=ctx.state.adaptive_coefs,
            policy_loss=ctx.inputs.extensions.policy_loss,
        )
        skipped_in_a_row = ctx.note_skipped(reports, step)
        updated = update_reference(ctx.policy.reference, algorithm.kl, step)
    state = rollouts.state  # data cursor and curriculum as they are after this step's rollouts
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
    """Send the initial weights to the engines, unless a stop was already requested; return the sync metrics."""
    return {} if ctx.should_stop() else sync_weights(ctx)


def sync_weights(ctx: RolloutContext) -> dict[str, float]:
    """Send the policy's weights to every engine, check the engines, and return metrics; empty in a replay."""
    if ctx.inputs.replay:
        return {}
    with ctx.phases.phase(Phase.SYNC):
        ctx.state = broadcast(ctx.state, ctx.job.group)  # to ranks that only host an engine
        if not ctx.settings.updates_running_groups:
            ctx.collector.finish_generation()
        reports = ctx.recovery.update_weights(ctx.state.optimizer_step)
        ctx.collector.synced_step = ctx.state.step
    return sync_metrics(reports, ctx.recovery.check_engines())


def keep_rollouts(ctx: RolloutContext) -> None:
    """Save the groups already generated for later steps if the run stops before its last step."""
    if ctx.state.step < ctx.settings.run.steps:
        with ctx.phases.phase(Phase.SAVE, "rollouts"):
            ctx.collector.stop()


def show_scores(ctx: TrainContext) -> None:
    """Show the eval scores before training next to those after the last step."""
    folder = ctx.settings.run.folder
    files = [file for step in (0, ctx.state.step) if (file := step_file(folder, step)).exists()]
    scores = [read_scores(file) for file in files] or [{}]
    ctx.progress.finish(scores[0], scores[-1])


def read_inputs(settings: Settings, world_size: int, ranks_per_node: int, dump: Path | None = None) -> RunInputs:
    """Check an RL run and read its inputs. `dump`: folder of a replay, which has neither engines nor prompts."""
    model = settings.model
    rollout = settings.rollout
    run = settings.run
    engine = settings.engine
    extensions = load_extensions(settings.algorithm, settings.monitor.loggers)
    check_place(run, settings.monitor, dump_settings(settings))
    trainers = world_size - engine.ranks
    hf, tokenizer = read_model(model, settings.layout, settings.training, trainers)
    recorded = recorded_shape(hf, settings.training)
    form = None if dump else check_engines(engine, hf, model.dtype, world_size, ranks_per_node, recorded=recorded)
    if settings.training.replays_keys:
        check_replayed_keys(engine.args, engine.gpus_per_engine, model_shape(hf), settings.max_request_tokens)
    formats = sent_formats(run, form)
    check_bucket(hf, model.dtype, settings.layout, settings.sync.bucket_bytes, formats=formats)
    if settings.critic:
        check_critic(settings.for_critic(), hf, trainers)
        check_critic_tokenizer(settings.critic.path, model, tokenizer)
    check_export(run, model)
    inputs = partial(RunInputs, hf=hf, tokenizer=tokenizer, extensions=extensions, recorded=recorded)
    if dump:
        return inputs(**replay_inputs(dump, run, rollout.max_response_tokens))

    hf.check_positions(settings.max_request_tokens, REQUEST_TOKENS)
    distillation = settings.algorithm.distillation
    train, evals, episodes = read_prompts(
        settings.data, rollout, settings.reward, tokenizer, only_evals=False, distillation=distillation
    )
    check_same_data(run.folder, train.digest)
    settings = settings.with_steps(train.epoch_size)
    if problem := settings.warmup_problem:
        raise UserError(problem)
    train.check_size("rollout.prompts_per_step", rollout.prompts_per_step, "prompts", settings.data.train)
    served = served_models(settings.reward, distillation.teachers if distillation else {})
    check_served_models(served, model, settings.max_request_tokens, tokenizer, world_size, ranks_per_node)
    scorer = make_scorer(settings.reward, rollout, settings.run.steps, settings.data.set_weights, tokenizer=tokenizer)
    teachers, unasked = make_teachers(distillation, hf, tokenizer)
    renderer = episodes.renderer if episodes else ChatRenderer(tokenizer, variables=settings.data.chat_template_kwargs)
    self_teacher = SelfTeacher.load(distillation, renderer, rollout.max_sequence_tokens)
    warnings = (
        *scorer.warnings,
        *data_warnings(train, evals),
        *start_warnings(settings.algorithm, rollout, form.title if form else "FP8" if engine.has_fp8_cache else None),
        *unasked,
    )
    return inputs(
        train=train,
        evals=evals,
        scorer=scorer,
        warnings=warnings,
        episodes=episodes,
        teachers=teachers,
        self_teacher=self_teacher,
        served=served,
    )


def greet(settings: Settings, inputs: RunInputs, ranks: int, step: int) -> str:
    """Return the first line of a run. `step`: last step of the checkpoint that it resumes; 0: none."""
    start = f"resumes after step {step}" if step else "starts"
    source = f"replaying {inputs.replay.folder}" if inputs.replay else "starting the engines"
    return f"{settings.run.folder}: {start} on {ranks} ranks; {settings.step_summary}; {source}"


@contextmanager
def open_context(settings: Settings, inputs: RunInputs) -> Iterator[RolloutContext]:
    """Open an RL job: start the engine, build the models, resume; yield a TrainContext on ranks that train."""
    preemption = PreemptionHandler()  # before engines and models, whose start takes minutes
    find_checkpoints = partial(resumable_checkpoints, settings.run.folder, inputs.train.digest)
    greeting = partial(greet, settings, inputs)
    with open_engines(settings, inputs, find_checkpoints, greeting) as engines, platform.gc_frozen():
        job = engines.job
        policy = engines.policy
        state = replace(engines.resumed.state, data=inputs.train.digest or engines.resumed.state.data)
        collector: RolloutCollector | ReplayCollector
        if inputs.replay:
            collector = ReplayCollector(inputs.replay, job, engines.phases)
        else:
            collector = make_collector(settings, inputs, engines)
        common = RolloutContext(
            settings=settings,
            inputs=inputs,
            job=job,
            collector=collector,
            evaluator=Evaluator(inputs.evals, settings.eval_sets, inputs.scorer, engines),
            recovery=engines.recovery,
            phases=engines.phases,
            timeline=engines.monitors.timeline,
            progress=engines.monitors.progress,
            preemption=preemption,
            state=state,
        )
        if not policy:
            yield common
            return
        limit_s = settings.monitor.phase_timeout_s
        with CheckpointSaver(settings.run, policy, limit_s, not engines.offloads, critic=engines.critic) as saver:
            models = vars(common) | {"parallel": policy.parallel, "policy": policy, "critic": engines.critic}
            yield TrainContext(**models, saver=saver)


def make_collector(settings: Settings, inputs: RunInputs, engines: Engines) -> RolloutCollector:
    """Return the collector, with the groups that an earlier job recorded."""
    job = engines.job
    rollout = engines.rollout
    return RolloutCollector(
        settings,
        inputs.train,
        rollout,
        inputs.scorer,
        job,
        phases=engines.phases,
        group_filter=inputs.extensions.group_filter,
        recovery=engines.recovery,
        curriculum=inputs.extensions.curriculum,
        recorded=read_recorded(settings.run.folder / ROLLOUTS, rollout.host_ranks, job),
    )


def run(settings: Settings, inputs: RunInputs) -> None:
    """Train as one rank of a started job."""
    with open_context(settings, inputs) as ctx:
        if isinstance(ctx, TrainContext):
            train(ctx)
        else:
            generate(ctx)


def describe(settings: Settings, inputs: RunInputs, world_size: int, ranks_per_node: int, every_setting: bool) -> str:
    """Return the text of a dry run: layout, sizes, first prompt, warnings, and settings as YAML."""
    facts = [describe_ranks(settings.layout, world_size, settings.engine.ranks, ranks_per_node), settings.step_summary]
    if inputs.replay:
        facts.append(f"rollouts: from {inputs.replay.folder}")
    else:
        facts.append(describe_engines(settings.engine, world_size, ranks_per_node))
        facts += describe_prompts(inputs, settings.data.eval)
    return dry_run_text(facts, inputs.warnings, settings.run.folder, show_settings(settings, every_setting))


def main(arguments: Sequence[str] | None = None, run: Callable[[Settings, RunInputs], None] = run) -> None:
    """Run the command line of `grpo-mp train`; raise SystemExit on failure. `run`: trains with the checked inputs."""
    with (
        command(train_parser(), arguments) as args,
        started_job(args.ranks, args.dry_run, args.ranks_per_node) as (world_size, ranks_per_node),
    ):
        settings = load_settings(args.config, args.overrides, dtype=platform.default_dtype())
        if args.replay:
            settings = settings.for_replay()
        inputs = read_inputs(settings, world_size, ranks_per_node, args.replay)
        settings = settings.with_steps(inputs.train.epoch_size)
        if args.dry_run:
            print_once(describe(settings, inputs, world_size, ranks_per_node, every_setting=args.all))
        else:
            run(settings, inputs)


if __name__ == "__main__":
    main()
