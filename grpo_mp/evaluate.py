"""Evaluate without training: `grpo-mp evaluate`, or `torchrun ... -m grpo_mp.evaluate` with the same arguments.

A Hugging Face folder is loaded by the engines; for a checkpoint the policy is built as
for training, and gives the engines its weights.
"""

import argparse
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_mp.utils.processes import end_with_launcher

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the seconds of imports without a trace
    end_with_launcher()

import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.algorithms.evaluation import plot_pass_at_k, write_scores, write_svg
from grpo_mp.algorithms.settings import KLConfig
from grpo_mp.checkpoint.run_state import read_manifest
from grpo_mp.config import Settings, load_settings
from grpo_mp.monitor.samples import append_samples
from grpo_mp.rollout.rollout import engines_can_load_weights
from grpo_mp.train import sync_weights
from grpo_mp.trainer.adapter_check import check_checkpoint
from grpo_mp.trainer.command_line import started_job
from grpo_mp.trainer.context import open_context, open_engines_only
from grpo_mp.trainer.evaluation import Evaluation, Evaluator
from grpo_mp.trainer.exit import exit_on_error
from grpo_mp.trainer.preflight import RunInputs, run_evaluation_preflight
from grpo_mp.trainer.step_logger import PASS_AT_K_FILE
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import incomplete, sync_to_disk
from grpo_mp.utils.log import log_to_terminal
from grpo_mp.utils.parsers import evaluate_parser

SCORES, SAMPLES = "eval.json", "samples.jsonl"


@dataclass(frozen=True)
class EvaluationJob:
    """What is evaluated. `settings.run.folder` is where the results go."""

    settings: Settings
    checkpoint: Path | None  # of a run; None: the model of the settings
    step: int  # of the checkpoint

    @property
    def name(self) -> Path:
        """Return the folder that is evaluated."""
        return self.checkpoint or self.settings.model.path

    @property
    def needs_policy(self) -> bool:
        """Return whether the engines cannot load the weights themselves."""
        return self.checkpoint is not None or not engines_can_load_weights(self.settings.model, self.settings.engine)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, see `grpo-mp evaluate --help`. Raises SystemExit where it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with exit_on_error():
        log_to_terminal()
        args = evaluate_parser().parse_intermixed_args(arguments)
        job = read_command(args)
        with started_job(args.ranks) as (world_size, ranks_per_node):
            inputs = run_evaluation_preflight(job.settings, world_size, ranks_per_node, job.needs_policy)
            run(job, inputs)


def read_command(args: argparse.Namespace) -> EvaluationJob:
    """Return the job of a command line. Raises UserError."""
    settings = load_settings(args.config, args.overrides, trains=False, dtype=platform.default_dtype())
    checkpoint = args.checkpoint
    if not settings.data.eval:
        raise UserError(f"{args.config}: data.eval names no set: add one, as data.eval.NAME=FILE")
    model = args.model or settings.model.path
    if checkpoint:
        check_checkpoint(checkpoint, settings.model.model_copy(update={"path": model}))
    out = args.out or settings.run.folder / "evaluate" / (checkpoint or model).absolute().name
    updates = {
        "run": settings.run.model_copy(update={"folder": out}),
        "model": settings.model.model_copy(update={"path": model}),
        # All ranks have engines.
        "schedule": "colocated",
        "engine": settings.engine.model_copy(update={"ranks": 0}),
        # Neither reference nor critic is needed.
        "critic": None,
        "algorithm": settings.algorithm.model_copy(update={"kl": KLConfig()}),
    }
    step = read_manifest(checkpoint).step if checkpoint else 0
    return EvaluationJob(settings.model_copy(update=updates), checkpoint, step)


def run(job: EvaluationJob, inputs: RunInputs) -> None:
    """Evaluate as one rank of a started job, and leave the results. Raises UserError for what a user can fix."""
    settings = job.settings
    problems = ", ".join(
        f"{len(inputs.evals[name])} problems of {name} x {eval_set.samples}"
        for name, eval_set in settings.data.eval.items()
    )
    greeting = f"{job.name}: {problems}; starting the engines"
    if job.needs_policy:
        with open_context(settings, inputs, lambda: [job.checkpoint] if job.checkpoint else [], greeting) as ctx:
            ctx.preemption.release()  # nothing is to be saved first
            sync_weights(ctx)
            evaluate_and_report(job, ctx.evaluator)
    else:
        with open_engines_only(settings, inputs, greeting) as engines:
            shown = settings.monitor.samples_per_step
            evaluate_and_report(job, Evaluator(inputs.evals, inputs.scorer, samples_shown=shown, **vars(engines)))


def evaluate_and_report(job: EvaluationJob, evaluator: Evaluator) -> None:
    """Evaluate every set; write scores, samples and picture into the folder, and show a table."""
    folder, ranks, progress = job.settings.run.folder, evaluator.job, evaluator.progress
    samples = _samples_file(folder, ranks.rank)
    samples.write_text("")
    evaluation = evaluator.evaluate(job.step, partial(append_samples, samples))
    dist.barrier(group=ranks.group)
    if ranks.rank == 0:
        join_samples([_samples_file(folder, rank) for rank in range(ranks.world_size)], folder / SAMPLES)
        _write_results(job, evaluation)
        progress.print_scores(str(job.name), evaluation.scores)
        progress.note(f"Scores:  {folder / SCORES}\nSamples: {folder / SAMPLES}")
    dist.barrier(group=ranks.group)


def join_samples(parts: Sequence[Path], file: Path) -> None:
    """Join the ranks' files to one, which is whole and on disk or as it was, and remove them."""
    with incomplete(file) as temporary:
        with temporary.open("wb") as joined:
            for part in parts:
                with part.open("rb") as lines:
                    shutil.copyfileobj(lines, joined)
        sync_to_disk(temporary)
    for part in parts:
        part.unlink()


def _write_results(job: EvaluationJob, evaluation: Evaluation) -> None:
    folder = job.settings.run.folder
    description = {
        "model": str(job.settings.model.path),
        "checkpoint": str(job.checkpoint) if job.checkpoint else None,
        "step": job.step,
        "settings": {name: job.settings.eval_set(name).model_dump(mode="json") for name in evaluation.scores},
        "rewards": {name: stats.to_dict() for name, stats in evaluation.reward_stats.items()},
    }
    write_scores(folder / SCORES, evaluation.scores, **description)
    (folder / PASS_AT_K_FILE).unlink(missing_ok=True)
    if figure := plot_pass_at_k({}, evaluation.scores):
        write_svg(figure, folder / PASS_AT_K_FILE)


def _samples_file(folder: Path, rank: int) -> Path:
    return folder / f"samples_rank_{rank}.jsonl"


if __name__ == "__main__":
    main()
