"""Answer prompts without training: `grpo-mp sample`, or `torchrun ... -m grpo_mp.sample` with the same arguments.

Answers are recorded as they come; a command that is given again continues after them.
"""

import argparse
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from grpo_mp.utils.processes import end_with_launcher

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the seconds of imports without a trace
    end_with_launcher()

import numpy as np
import torch.distributed as dist

from grpo_mp.checkpoint.run_lock import run_lock
from grpo_mp.checkpoint.run_state import claim_run_folder
from grpo_mp.config import dump_settings
from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.rollout.journal import GroupJournal, Record
from grpo_mp.rollout.rollout import rollout_seed
from grpo_mp.trainer.command_line import started_job
from grpo_mp.trainer.engine_job import EngineJob, read_engine_job, start_engines
from grpo_mp.trainer.exit import exit_on_error
from grpo_mp.trainer.preflight import RunInputs, run_sampling_preflight
from grpo_mp.trainer.sampling.farm import SampleFarm, Throughput
from grpo_mp.trainer.sampling.filters import SampleFilter, check_columns, load_sample_filters
from grpo_mp.trainer.sampling.identity import SamplingIdentity, check_folder
from grpo_mp.trainer.sampling.results import (
    GROUPS,
    PARTS,
    PASS_RATES,
    SAMPLES,
    SUMMARY,
    Counts,
    PartWriter,
    join,
    recorded_share,
    share_of_prompts,
    sum_counts,
)
from grpo_mp.trainer.sampling.table import Source
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import read_json, write_json
from grpo_mp.utils.log import log_to_terminal
from grpo_mp.utils.parsers import sample_parser
from grpo_mp.utils.phases import Phase
from grpo_mp.utils.types import Prompt

GENERATED = "generated.json"  # all prompts are answered, and how fast
Recorded = Mapping[int, Record]  # by prompt


@dataclass(frozen=True)
class SamplingJob(EngineJob):
    """What is sampled, and which answers are kept."""

    filters: Mapping[str, SampleFilter]
    prompts_digest: str = ""  # once they are read

    @cached_property
    def identity(self) -> SamplingIdentity:
        """Return what the answers follow from."""
        return SamplingIdentity.of(self.settings, self.name, self.prompts_digest)

    @property
    def has_episodes(self) -> bool:
        """Return whether an answer may have several turns."""
        return self.settings.rollout.rollout_function is not None

    def prompts(self, inputs: RunInputs) -> Sequence[Prompt]:
        """Return the prompts to answer: of a mixture those of all its sets, each once."""
        count = self.settings.sample.max_prompts
        return FirstPrompts(inputs.train.prompts, min(len(inputs.train), count or len(inputs.train)))


@dataclass(frozen=True)
class FirstPrompts(Sequence[Prompt]):
    """The first of some prompts, read when they are asked for."""

    prompts: Sequence[Prompt]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """Return a prompt. Raises IndexError."""
        return self.prompts[range(self.length)[index]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, see `grpo-mp sample --help`. Raises SystemExit where it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with exit_on_error():
        log_to_terminal()
        args = sample_parser().parse_intermixed_args(arguments)
        job = read_command(args)
        with started_job(args.ranks) as (world_size, ranks_per_node):
            inputs = run_sampling_preflight(job.settings, world_size, ranks_per_node, job.needs_policy)
            job = replace(job, prompts_digest=inputs.train.digest)
            check_folder(job.folder, job.identity)
            check_columns(job.filters, inputs.train.prompts[0])
            run(job, inputs)


def read_command(args: argparse.Namespace) -> SamplingJob:
    """Return the job of a command line."""
    job = read_engine_job(args, "sample")
    settings = job.settings.for_sampling()
    group_size = args.samples or settings.rollout.group_size
    rollout = settings.rollout.model_copy(update={"group_size": group_size})
    settings = settings.model_copy(update={"rollout": rollout})
    knows_correct = settings.reward.correctness_rule is not None
    filters = load_sample_filters(settings.sample.filters, group_size, knows_correct)
    job = SamplingJob(settings, job.checkpoint, filters)
    if job.settings.reward.own_models and job.needs_policy:
        raise UserError(
            f"{job.name}: a policy gives engines these weights, and no room is left for reward models that the job "
            "serves: give a Hugging Face folder, or serve them elsewhere and set their url"
        )
    return job


def run(job: SamplingJob, inputs: RunInputs) -> None:
    """Sample as one rank of a started job, and leave the results. Raises UserError for what a user can fix.

    Where all prompts are answered no engine starts: answers are filtered anew where the filters have changed.
    """
    prompts = job.prompts(inputs)
    generated = read_json(job.folder / GENERATED)
    if generated.get("prompts", 0) >= len(prompts):
        if int(os.environ.get("RANK", 0)) == 0:
            _filter_again(job, inputs, Throughput(**generated["throughput"]))
        return
    greeting = f"{job.name}: {len(prompts):,} prompts x {job.settings.rollout.group_size}; starting the engines"
    with start_engines(job, inputs, greeting) as engines:
        rank, size, group = engines.job.rank, engines.job.world_size, engines.job.group
        if rank == 0:
            job.identity.write(job.folder)
            (job.folder / GENERATED).unlink(missing_ok=True)
            shutil.rmtree(job.folder / PARTS, ignore_errors=True)
        done = _answered(job, len(prompts), engines.job)
        if done:
            engines.progress.note(f"{len(done):,} of {len(prompts):,} prompts were answered before")
        journal = GroupJournal(job.folder / GROUPS, rank)
        throughput = SampleFarm(job.settings, prompts, engines, journal).run(done)
        with engines.phases.phase(Phase.SAVE, "answers"):
            recorded = _all_recorded(job, len(prompts), engines.job)
            if rank == 0 and len(recorded) == len(prompts):
                write_json(job.folder / GENERATED, {"prompts": len(prompts), "throughput": asdict(throughput)})
            counts = all_gather(_write_part(job, inputs, recorded=recorded, rank=rank, size=size), group)
            if rank == 0:
                note = _finish(job, len(prompts), counts=sum_counts(counts), parts=size, throughput=throughput)
        if rank == 0:
            engines.progress.stop()
            engines.progress.note(note)
        dist.barrier(group=group)
    check_answered(job, len(recorded), len(prompts))


def check_answered(job: SamplingJob, answered: int, prompts: int) -> None:
    """Raise UserError where more of the prompts than allowed have no answers: what follows would miss them."""
    allowed = job.settings.sample.max_unanswered
    missing = prompts - answered
    if missing > allowed * prompts:
        raise UserError(
            f"{job.folder}: {missing:,} of {prompts:,} prompts have no answers after rollout.group_timeout_s="
            f"{job.settings.rollout.group_timeout_s:g}, and sample.max_unanswered={allowed:g}: the same command asks "
            "them again; raise either"
        )


def _answered(job: SamplingJob, prompts: int, ranks: Job) -> set[int]:
    """Return which of so many prompts all ranks find in the journal. Every rank must call this."""
    numbers = np.fromiter(recorded_share(job.folder, ranks.rank, ranks.world_size), dtype=np.int64)
    return {number for share in all_gather(numbers[numbers < prompts], ranks.group) for number in share.tolist()}


def _all_recorded(job: SamplingJob, prompts: int, ranks: Job) -> Recorded:
    """Return what all ranks find in the journal of so many prompts. Every rank must call this."""
    shares = all_gather(recorded_share(job.folder, ranks.rank, ranks.world_size), ranks.group)
    return {prompt: record for share in shares for prompt, record in share.items() if prompt < prompts}


def _write_part(job: SamplingJob, inputs: RunInputs, recorded: Recorded, rank: int, size: int) -> Counts:
    """Write what this of `size` ranks makes of its share of the recorded prompts."""
    identity, seed = job.identity, rollout_seed(job.settings, "train")
    source = Source(str(job.name), identity.model, identity.settings_digest, seed)
    tools = inputs.episodes.schemas_of if inputs.episodes else None
    writer = PartWriter(job.folder, rank, prompts=job.prompts(inputs), filters=job.filters, source=source, tools=tools)
    return writer.write(share_of_prompts(recorded, rank, size))


def _finish(job: SamplingJob, prompts: int, counts: Counts, parts: int, throughput: Throughput) -> str:
    """Write the files of the answers, the summary last; return what to tell people."""
    identity = job.identity
    facts = {
        "model": str(job.settings.model.path),
        "checkpoint": str(job.checkpoint) if job.checkpoint else None,
        "model_digest": identity.model,
        "settings_digest": identity.settings_digest,
        "seed": job.settings.run.seed,
        "deterministic": job.settings.engine.deterministic,
        "filters": job.settings.sample.filters,
        "prompts": prompts,
    }
    (job.folder / SUMMARY).unlink(missing_ok=True)  # it would vouch for other rows
    join(job.folder, parts, job.has_episodes, json.dumps(facts))
    speed = throughput.to_dict()
    summary = counts.to_dict()
    write_json(job.folder / SUMMARY, facts | summary | {"last_start": speed})
    return _describe(job, prompts, summary, speed)


def _describe(job: SamplingJob, prompts: int, summary: Mapping[str, Any], speed: Mapping[str, Any]) -> str:
    """Return the lines that end a sampling."""
    accuracy = "" if summary["accuracy"] is None else f", {summary['accuracy']:.1%} right"
    missing = prompts - summary["answered_prompts"]
    dropped = ", ".join(f"{name} {count:,}" for name, count in summary["dropped"].items()) or "nothing"
    lines = [
        f"{summary['samples']:,} answers to {summary['answered_prompts']:,} prompts{accuracy}; dropped: {dropped}; "
        f"kept {summary['kept']:,} to {summary['kept_prompts']:,} prompts",
        f"engines: {speed['tokens']:,} tokens in {speed['seconds']:.1f} s, {speed['tokens_per_s']:,.0f} tokens/s",
        f"Samples:    {job.folder / SAMPLES}",
        f"Pass rates: {job.folder / PASS_RATES}",
        f"Summary:    {job.folder / SUMMARY}",
    ]
    if missing:
        lines.insert(1, f"warning: {missing:,} prompts took too long: the same command asks them again")
    return "\n".join(lines)


def _filter_again(job: SamplingJob, inputs: RunInputs, throughput: Throughput) -> None:
    """Write the files anew by the present filters, without engines."""
    prompts = job.prompts(inputs)
    with run_lock(job.folder):
        asked = {prompt: record for prompt, record in recorded_share(job.folder, 0, 1).items() if prompt < len(prompts)}
        if missing := len(prompts) - len(asked):
            (job.folder / GENERATED).unlink()
            raise UserError(
                f"{job.folder / GROUPS}: the answers to {missing:,} of {len(prompts):,} prompts are gone or damaged: "
                f"the same command asks these again; {SAMPLES} is as it was"
            )
        shutil.rmtree(job.folder / PARTS, ignore_errors=True)
        claim_run_folder(job.folder, dump_settings(job.settings))
        counts = _write_part(job, inputs, recorded=asked, rank=0, size=1)
        print(_finish(job, len(prompts), counts=counts, parts=1, throughput=throughput))


if __name__ == "__main__":
    main()
