"""Evaluate a model or checkpoint: `grpo-mp evaluate`, or `torchrun ... -m grpo_mp.evaluate` with the same arguments.

Engines load the weights of a Hugging Face folder themselves. For a run's checkpoint, the policy is built as for
training and sends its weights to the engines. `grpo-mp sample` and `grpo-mp train` open their engines here, too.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from grpo_mp.utils.processes import begin_slow_imports

if __name__ == "__main__":
    begin_slow_imports()

import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import MANIFEST, read_manifest
from grpo_mp.config import Settings, dump_settings, load_settings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.process_groups import make_parallel
from grpo_mp.monitor.evaluation import write_scores
from grpo_mp.monitor.samples import append_samples
from grpo_mp.policy.reference import Reference
from grpo_mp.rollout.engine_layout import attention_replicas
from grpo_mp.rollout.reward_servers import check_served_models, served_models
from grpo_mp.rollout.rollout import Rollout, base_spec, engines_can_load_weights
from grpo_mp.trainer.command_line import command, started_job
from grpo_mp.trainer.engine_check import MAX_PROMPTS, EngineCheck
from grpo_mp.trainer.engines import Engines, make_phases, starting_engine
from grpo_mp.trainer.evaluation import Evaluation, Evaluator
from grpo_mp.trainer.job import FindCheckpoints, build_critic, build_policy, join_run, open_monitors, show_notes
from grpo_mp.trainer.offload import nccl_memory, offload_functions
from grpo_mp.trainer.preflight import (
    REQUEST_TOKENS,
    RunInputs,
    check_bucket,
    check_engines,
    check_place,
    load_extensions,
    make_scorer,
    read_model,
    read_prompts,
)
from grpo_mp.trainer.recover import EngineRecovery
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import incomplete
from grpo_mp.utils.parsers import evaluate_parser
from grpo_mp.utils.phases import Phase
from grpo_mp.weight_sync.update import PolicyShards, build_weight_sync

SCORES = "eval.json"
SAMPLES = "samples.jsonl"


@dataclass(frozen=True)
class EngineJob:
    """Settings and weights of a job that only generates; results go to `settings.run.folder`."""

    settings: Settings
    checkpoint: Path | None  # folder of a run's checkpoint; None: use `model.path`

    @property
    def name(self) -> Path:
        return self.checkpoint or self.settings.model.path

    @property
    def folder(self) -> Path:
        return self.settings.run.folder

    @property
    def resolved(self) -> str:
        """Return the settings with all defaults, as YAML."""
        return dump_settings(self.settings)

    @property
    def needs_policy(self) -> bool:
        """Return whether a policy must send the weights, because engines cannot load them from the folder."""
        return self.checkpoint is not None or not engines_can_load_weights(self.settings.model, self.settings.engine)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of `grpo-mp evaluate`; raise SystemExit on failure."""
    with command(evaluate_parser(), arguments) as args:
        job = read_command(args)
        with started_job(args.ranks) as (world_size, ranks_per_node):
            run(job, read_inputs(job, world_size, ranks_per_node))


def read_command(args: argparse.Namespace) -> EngineJob:
    """Return the evaluation job that the parsed arguments describe."""
    job = read_engine_job(args, "evaluate")
    if not job.settings.data.eval:
        raise UserError(f"{args.config}: data.eval names no set: add one, as data.eval.NAME=FILE")
    return job


def read_engine_job(args: argparse.Namespace, command: str) -> EngineJob:
    """Return the job that the parsed arguments describe; results go to --out, by default RUN/`command`/MODEL."""
    settings = load_settings(args.config, args.overrides, trains=False, dtype=platform.default_dtype())
    checkpoint = args.checkpoint
    model = args.model or settings.model.path
    if checkpoint:
        if not (checkpoint / MANIFEST).is_file():
            raise UserError(f"{checkpoint}: incomplete checkpoint, {MANIFEST} is missing: give RUN/checkpoints/step_N")
        read_manifest(checkpoint)
    out = args.out or settings.run.folder / command / (checkpoint or model).absolute().name
    updates = {
        "run": settings.run.model_copy(update={"folder": out}),
        "model": settings.model.model_copy(update={"path": model}),
    }
    return EngineJob(settings.without_training().model_copy(update=updates), checkpoint)


def read_inputs(job: EngineJob, world_size: int, ranks_per_node: int) -> RunInputs:
    """Check a job that only generates and read its inputs. It answers the eval sets or, without any, the train set."""
    settings = job.settings
    evaluates = bool(job.settings.data.eval)
    model = settings.model
    rollout = settings.rollout
    reward = settings.reward
    check_place(settings.run, settings.monitor, job.resolved)
    hf, tokenizer = read_model(model, settings.layout, settings.training, world_size * job.needs_policy)
    form = check_engines(settings.engine, hf, model.dtype, world_size, ranks_per_node=ranks_per_node)
    check_bucket(hf, model.dtype, settings.layout, settings.sync.bucket_bytes, formats={form})
    hf.check_positions(settings.max_request_tokens, REQUEST_TOKENS)
    train, evals, episodes = read_prompts(settings.data, rollout, reward, tokenizer, only_evals=evaluates)
    scorer = make_scorer(reward, rollout, settings.run.steps, settings.data.set_weights, tokenizer=tokenizer)
    served = {} if evaluates else served_models(reward, {})
    check_served_models(served, model, settings.max_request_tokens, tokenizer, world_size, ranks_per_node)
    return RunInputs(
        hf=hf,
        tokenizer=tokenizer,
        train=train,
        evals=evals,
        scorer=scorer,
        extensions=load_extensions(settings.algorithm, settings.monitor.loggers),
        warnings=(*scorer.warnings, *(sentence for one in (evals.values() or [train]) for sentence in one.warnings)),
        episodes=episodes,
        served=served,
    )


def run(job: EngineJob, inputs: RunInputs) -> None:
    """Evaluate as one rank of a started job, and write the results to the job's folder."""
    problems = ", ".join(
        f"{len(inputs.evals[name])} problems of {name} x {eval_set.samples}"
        for name, eval_set in job.settings.data.eval.items()
    )
    with start_engines(job, inputs, f"{job.name}: {problems}; starting the engines") as engines:
        evaluate_and_report(job, Evaluator(inputs.evals, job.settings.eval_sets, inputs.scorer, engines))


def evaluate_and_report(job: EngineJob, evaluator: Evaluator) -> None:
    """Evaluate every set; write scores, samples and the pass@k plot to the job's folder, and print a table."""
    folder = job.folder
    ranks = evaluator.engines.job
    progress = evaluator.engines.monitors.progress
    step = read_manifest(job.checkpoint).step if job.checkpoint else 0
    samples = _samples_file(folder, ranks.rank)
    samples.write_text("")
    evaluation = evaluator.evaluate(step, partial(append_samples, samples))
    dist.barrier(group=ranks.group)
    if ranks.rank == 0:
        parts = [_samples_file(folder, rank) for rank in range(ranks.world_size)]
        with incomplete(folder / SAMPLES) as temporary, temporary.open("wb") as joined:
            for part in parts:
                joined.write(part.read_bytes())
        for part in parts:
            part.unlink()
        _write_results(job, evaluation, step)
        progress.print_scores(str(job.name), evaluation.scores)
        progress.note(f"Scores:  {folder / SCORES}\nSamples: {folder / SAMPLES}")
    dist.barrier(group=ranks.group)


def _write_results(job: EngineJob, evaluation: Evaluation, step: int) -> None:
    folder = job.folder
    description = {
        "model": str(job.settings.model.path),
        "checkpoint": str(job.checkpoint) if job.checkpoint else None,
        "step": step,
        "settings": {name: eval_set.model_dump(mode="json") for name, eval_set in job.settings.eval_sets.items()},
        "rewards": {name: stats.to_dict() for name, stats in evaluation.reward_stats.items()},
    }
    write_scores(folder / SCORES, evaluation.scores, **description)


def _samples_file(folder: Path, rank: int) -> Path:
    return folder / f"samples_rank_{rank}.jsonl"


@contextmanager
def start_engines(job: EngineJob, inputs: RunInputs, greeting: str) -> Iterator[Engines]:
    """Run engines with the job's weights while the body runs."""
    checkpoints = [job.checkpoint] if job.checkpoint else []
    with open_engines(
        job.settings, inputs, lambda: checkpoints, lambda *_: greeting, builds_policy=job.needs_policy
    ) as engines:
        if job.needs_policy:
            with engines.phases.phase(Phase.SYNC):
                engines.recovery.update_weights(engines.resumed.state.optimizer_step)
            engines.recovery.check_engines()
        yield engines


@contextmanager
def open_engines(
    settings: Settings,
    inputs: RunInputs,
    find_checkpoints: FindCheckpoints,
    greet: Callable[[int, int], str],
    builds_policy: bool = True,
) -> Iterator[Engines]:
    """Start this rank's engine; build policy and critic on ranks that train; close all at the end.

    `greet`: returns the first line of the job, from its ranks and the last step of the checkpoint that it resumes;
    `builds_policy`: False: engines load the weights of `model.path`.
    """
    run = settings.run
    model = settings.model
    engine = settings.engine
    limit_s = settings.monitor.phase_timeout_s
    with (
        join_run(run, limit_s, dump_settings(settings), find_checkpoints, engine.ranks) as (job, resumed),
        ExitStack() as stack,
    ):
        base = base_spec(model, settings.max_request_tokens, run.seed, rank=job.rank, load_weights=not builds_policy)
        rollout = stack.enter_context(
            Rollout(inputs, engine, settings.rollout, base, job=job, logs=run.folder / "logs")
        )
        stack.callback(inputs.scorer.close)
        if inputs.teachers:
            stack.callback(inputs.teachers.close)
        step = resumed.state.step
        monitors = stack.enter_context(open_monitors(run.folder, job.rank, run.steps, step, stops=(rollout.stop,)))
        show_notes(monitors.progress, job.rank, greet(job.world_size, step), resumed, inputs.warnings)

        syncs = builds_policy and inputs.has_engines
        offloads = platform.on_cuda() and syncs and settings.shares_devices and model.offloads
        policy = critic = None
        with starting_engine(job, rollout, monitors, engines_first=offloads):
            if builds_policy and job.trains:
                parallel = make_parallel(job, settings.layout, run.seed)
                with_reference = settings.algorithm.kl.coef > 0
                policy = build_policy(settings, parallel, resumed.state, resumed.checkpoint, with_reference)
                if settings.critic:
                    critic = build_critic(settings.for_critic(), parallel, resumed.checkpoint)
        functions = {}
        if offloads and policy:
            moves = settings.optimizer.offload == "step"
            functions = offload_functions(policy, rollout, moves, nccl_memory(settings.layout), critic=critic)
        phases = make_phases(monitors, policy, critic, limit_s, functions)
        recovery = EngineRecovery(rollout, job, phases, version=resumed.state.optimizer_step)
        engines = Engines(job, rollout, phases, monitors, recovery, resumed, policy, critic, offloads)
        if syncs:
            connect_engines(settings, inputs, engines)
        yield engines
        phases.end()


def connect_engines(settings: Settings, inputs: RunInputs, engines: Engines) -> None:
    """Plan how the policy's weights reach the engines, and how the engines are checked."""
    policy = engines.policy
    job = engines.job
    rollout = engines.rollout
    recovery = engines.recovery
    shards = PolicyShards.of_policy(policy) if policy else PolicyShards.none(inputs.hf, settings.layout)
    sync = build_weight_sync(settings.engine, settings.model, settings.sync, shards, rollout, job)
    form = sync.resharder.wire.format
    in_fp8 = settings.training.fp8_format or settings.engine.has_fp8_cache
    precision = form.precision if form else "fp8" if in_fp8 else settings.model.dtype
    recovery.weight_sync = sync
    recovery.engine_check = EngineCheck(
        policy,
        has_experts=model_shape(inputs.hf).num_experts > 0,
        job=job,
        weight_sync=sync,
        engines=rollout,
        phases=engines.phases,
        prompts=[prompt.tokens for prompt in islice(inputs.train, MAX_PROMPTS)],
        longest=settings.rollout.max_sequence_tokens,
        replicas=attention_replicas(settings.engine.args),
        precision=precision,
        tolerance=settings.sync.check_tolerance,
        correction=settings.algorithm.rollout_correction,
    )
    if policy and settings.keeps_former_weights:
        recovery.former = Reference(policy.trained_tensors)


if __name__ == "__main__":
    main()
