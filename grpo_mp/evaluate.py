"""Evaluate a model or checkpoint: `grpo-mp evaluate`, or `torchrun ... -m grpo_mp.evaluate` with the same arguments."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from grpo_mp.utils.processes import begin_slow_imports

if __name__ == "__main__":
    begin_slow_imports()

import torch.distributed as dist

from grpo_mp.algorithms.evaluation import write_scores
from grpo_mp.checkpoint.run_state import read_manifest
from grpo_mp.monitor.samples import append_samples
from grpo_mp.trainer.command_line import command, started_job
from grpo_mp.trainer.context import EngineJob, read_engine_job, start_engines
from grpo_mp.trainer.evaluation import Evaluation, Evaluator
from grpo_mp.trainer.preflight import RunInputs, run_generation_preflight
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import incomplete
from grpo_mp.utils.parsers import evaluate_parser

SCORES, SAMPLES = "eval.json", "samples.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of `grpo-mp evaluate`; raise SystemExit on failure."""
    with command(evaluate_parser(), arguments) as args:
        job = read_command(args)
        with started_job(args.ranks) as (world_size, ranks_per_node):
            run(
                job,
                run_generation_preflight(job.settings, world_size, ranks_per_node, job.needs_policy, evaluates=True),
            )


def read_command(args: argparse.Namespace) -> EngineJob:
    """Return the evaluation job that the parsed arguments describe."""
    job = read_engine_job(args, "evaluate")
    if not job.settings.data.eval:
        raise UserError(f"{args.config}: data.eval names no set: add one, as data.eval.NAME=FILE")
    return job


def run(job: EngineJob, inputs: RunInputs) -> None:
    """Evaluate as one rank of a started job, and write the results to the job's folder."""
    problems = ", ".join(
        f"{len(inputs.evals[name])} problems of {name} x {eval_set.samples}"
        for name, eval_set in job.settings.data.eval.items()
    )
    with start_engines(job, inputs, f"{job.name}: {problems}; starting the engines") as engines:
        evaluate_and_report(job, Evaluator(inputs.evals, inputs.scorer, engines))


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
        "settings": {name: job.settings.eval_set(name).model_dump(mode="json") for name in evaluation.scores},
        "rewards": {name: stats.to_dict() for name, stats in evaluation.reward_stats.items()},
    }
    write_scores(folder / SCORES, evaluation.scores, **description)


def _samples_file(folder: Path, rank: int) -> Path:
    return folder / f"samples_rank_{rank}.jsonl"


if __name__ == "__main__":
    main()
