"""Sample answers to prompts: `grpo-mp sample`, or `torchrun ... -m grpo_mp.sample` with the same arguments.

Finished groups are recorded at once, so running the same command again continues an interrupted job.
"""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from grpo_mp.utils.processes import begin_slow_imports

if __name__ == "__main__":
    begin_slow_imports()

import torch.distributed as dist

from grpo_mp.checkpoint.run_lock import run_lock
from grpo_mp.checkpoint.run_state import METRICS, claim_run_folder, complete_checkpoints
from grpo_mp.checkpoint.settings_changes import dotted
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.evaluate import EngineJob, read_engine_job, read_inputs, start_engines
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.rollout.rollout import rollout_seed
from grpo_mp.trainer.command_line import command, started_job
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.trainer.sampling.answers import (
    GROUPS,
    PASS_RATES,
    SAMPLES,
    SUMMARY,
    AnswerWriter,
    read_recorded,
)
from grpo_mp.trainer.sampling.farm import SampleFarm
from grpo_mp.trainer.sampling.filters import SampleFilter, load_sample_filters
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import read_json, stat_digest, write_json
from grpo_mp.utils.parsers import sample_parser
from grpo_mp.utils.redact import has_secrets
from grpo_mp.utils.types import Prompt
from grpo_mp.utils.user_code import file_digests

IDENTITY = "identity.json"
SECTIONS: dict[str, Any] = {  # settings that affect the answers and their scores; True: the whole section
    "run": {"seed"},
    "model": {"family", "dtype"},
    "rollout": {
        *("group_size", "max_prompt_tokens", "max_response_tokens", "temperature", "top_p", "stop"),
        *("tools", "tool_args", "tool_environment", "tool_parser"),
        *("function", "function_args", "limits", "failed"),
    },
    "engine": {"deterministic", "args", "speculative"},
    "reward": True,
}
# Settings of these sections that affect only where and how fast answers are computed and scored.
NEUTRAL = re.compile(
    r"reward\..*(url|api_key_env|args\.tp_size|timeout_s)"
    r"|engine\.args\.(mem_fraction_static|max_running_requests|chunked_prefill_size)"
)


@dataclass(frozen=True)
class SamplingJob(EngineJob):
    """A sampling job: settings, weights, and the filters that select the answers to keep."""

    filters: Mapping[str, SampleFilter]

    def prompts(self, inputs: RunInputs) -> Sequence[Prompt]:
        most = self.settings.sample.max_prompts
        return list(islice(inputs.train, most)) if most else inputs.train

    def identity(self, inputs: RunInputs) -> dict[str, Any]:
        """Return name -> value of all inputs that determine the answers: settings, weights, prompts and user code."""
        settings = self.settings.model_dump(mode="json", include=SECTIONS)
        decisive = {name: value for name, value in dotted(settings) if not NEUTRAL.fullmatch(name)}
        weights = stat_digest(file for file in self.name.rglob("*") if file.suffix in (".safetensors", ".bin"))
        files = {"the model's files": weights, "the prompts": inputs.train.digest}
        return decisive | files | file_digests(settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of `grpo-mp sample`; raise SystemExit on failure."""
    with command(sample_parser(), arguments) as args:
        job = read_command(args)
        with started_job(args.ranks) as (world_size, ranks_per_node):
            run(job, read_inputs(job, world_size, ranks_per_node))


def read_command(args: argparse.Namespace) -> SamplingJob:
    """Return the sampling job that the parsed arguments describe."""
    job = read_engine_job(args, "sample")
    settings = job.settings.for_sampling()
    group_size = args.samples or settings.rollout.group_size
    rollout = settings.rollout.model_copy(update={"group_size": group_size})
    settings = settings.model_copy(update={"rollout": rollout})
    knows_correct = settings.reward.correct_term is not None
    filters = load_sample_filters(settings.sample.filters, group_size, knows_correct)
    job = SamplingJob(settings, job.checkpoint, filters)
    if job.settings.reward.own_models and job.needs_policy:
        raise UserError(
            f"{job.name}: a policy gives engines these weights, and no room is left for reward models that the job "
            "serves: give a Hugging Face folder, or serve them elsewhere and set their url"
        )
    return job


def run(job: SamplingJob, inputs: RunInputs) -> None:
    """Sample as one rank of a started job, and write the results to the job's folder.

    If every prompt is already answered, no engine starts: the files are rewritten, for example with other filters.
    """
    check_folder(job, inputs)
    prompts = job.prompts(inputs)
    before = read_json(job.folder / SUMMARY)
    throughput = before.get("last_start")
    if before.get("answered_prompts", 0) < len(prompts):
        throughput = generate(job, inputs, prompts)
    if int(os.environ.get("RANK", 0)) == 0:
        with run_lock(job.folder):
            claim_run_folder(job.folder, job.resolved)
            write_answers(job, inputs, prompts, throughput)


def check_folder(job: SamplingJob, inputs: RunInputs) -> None:
    """Raise UserError if the folder holds a training run, or answers from other settings, weights, prompts or code."""
    if (job.folder / METRICS).exists() or complete_checkpoints(job.folder):
        raise UserError(f"{job.folder} holds a training run: choose another --out")
    if not (job.folder / IDENTITY).exists():
        return
    before = read_json(job.folder / IDENTITY)
    now = job.identity(inputs)
    changed = [
        f"{name} was {before.get(name)!r}, is now {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise UserError(
            f"{job.folder} holds answers of another sampling ({changed[0]}): choose another --out, or move it"
        )


def generate(job: SamplingJob, inputs: RunInputs, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Generate answers for the prompts without recorded ones; return the throughput, see Throughput."""
    settings = job.settings
    greeting = f"{job.name}: {len(prompts):,} prompts x {settings.rollout.group_size}; starting the engines"
    with start_engines(job, inputs, greeting) as engines:
        ranks = engines.job
        if ranks.rank == 0:
            identity = job.identity(inputs)
            write_json(job.folder / IDENTITY, identity, private=has_secrets(identity))
        own = set(read_recorded(job.folder, len(prompts), ranks.rank, ranks.world_size))
        done = set[int]().union(*all_gather(own, ranks.group))
        if done:
            engines.monitors.progress.note(f"{len(done):,} of {len(prompts):,} prompts were answered before")
        journal = GroupJournal(job.folder / GROUPS, ranks.rank)
        seed = rollout_seed(settings.run.seed, settings.engine, "train")
        farm = SampleFarm(settings.engine, settings.rollout, prompts, engines=engines, journal=journal, seed=seed)
        throughput = farm.run(done)
        dist.barrier(group=ranks.group)
    return throughput.to_dict()


def write_answers(job: SamplingJob, inputs: RunInputs, prompts: Sequence[Prompt], throughput: Any) -> None:
    """Write samples, pass rates and summary, and print the summary."""
    facts = {
        "model": str(job.settings.model.path),
        "checkpoint": str(job.checkpoint) if job.checkpoint else None,
        "seed": job.settings.run.seed,
        "deterministic": job.settings.engine.deterministic,
        "filters": job.settings.sample.filters,
        "prompts": len(prompts),
    }
    tools = inputs.episodes.tools.schemas if inputs.episodes else None
    (job.folder / SUMMARY).unlink(missing_ok=True)  # the old summary would describe other rows
    writer = AnswerWriter(job.folder, prompts, job.filters, tools)
    summary = writer.write(read_recorded(job.folder, len(prompts)), facts)
    write_json(job.folder / SUMMARY, facts | summary | {"last_start": throughput})

    accuracy = "" if summary["accuracy"] is None else f", {summary['accuracy']:.1%} right"
    dropped = ", ".join(f"{name} {count:,}" for name, count in summary["dropped"].items()) or "nothing"
    print(
        f"{summary['samples']:,} answers to {summary['answered_prompts']:,} prompts{accuracy}; dropped: {dropped}; "
        f"kept {summary['kept']:,} to {summary['kept_prompts']:,} prompts"
    )
    if throughput:
        print(f"engines: {throughput['tokens']:,} tokens in {throughput['seconds']:.1f} s")
    for label, name in (("Samples", SAMPLES), ("Pass rates", PASS_RATES), ("Summary", SUMMARY)):
        print(f"{label + ':':<11} {job.folder / name}")


if __name__ == "__main__":
    main()
