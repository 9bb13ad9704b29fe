"""Run the jobs of a pipeline one after another, and go on where an earlier start ended."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mp.config import PipelineSettings, Settings, SftSettings
from grpo_mp.models.folder_digest import model_digest
from grpo_mp.pipeline.inputs import StageInputs, check_made, load_job_settings, read_inputs, read_tree, texts_in
from grpo_mp.pipeline.stages import Record, StageJob, check_inputs, check_records, digests, present_records
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import file_digest, write_json
from grpo_mp.utils.processes import PR_SET_PDEATHSIG, prctl
from grpo_mp.utils.reading import read_json, read_text
from grpo_mp.utils.user_code import file_digests

RECORDS, LOCK = "pipeline.json", "pipeline.lock"
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)  # which let a run save and end


def check_jobs(jobs: Sequence[StageJob]) -> dict[Path, str]:
    """Check the settings of every job, and return the content of their files. Raises UserError."""
    texts, settings = dict[Path, str](), dict[str, Settings | SftSettings]()
    for number, job in enumerate(jobs):
        texts[job.config] = read_text(job.config)
        try:
            settings[job.name] = load_job_settings(job)
            check_made(job, jobs[:number], settings)
        except UserError as error:
            raise UserError(f"stage {job.name}: {error}") from error
        if job.command in ("train", "sft") and not settings[job.name].run.export:
            raise UserError(f"stage {job.name}: run.export=false leaves no model for the next stage: leave it out")
    return texts


def check_ahead(inputs: Sequence[StageInputs], ranks: int | None, starts: bool) -> None:
    """Check stages as their commands do, in a process that takes with it what it imports, users' code too.

    `starts`: they are to run on this machine. Raises UserError, with the stage's name, for one that cannot run.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            pool.submit(_check_stages, inputs, ranks, starts).result()
        except BrokenProcessPool as error:
            raise UserError("what checks the stages was killed, and nothing has started: start again") from error


def _end_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a trace


def _check_stages(inputs: Sequence[StageInputs], ranks: int | None, starts: bool) -> None:
    from grpo_mp.pipeline.preflight import check_stages, job_size  # torch and what users wrote
    from grpo_mp.utils.log import log_to_terminal

    log_to_terminal()
    check_stages(inputs, job_size(ranks, starts))


def input_digests(job: StageJob) -> dict[str, str]:
    """Return the digests of what a job reads and that is there: files of data and code, and models, by path."""
    tree = read_tree(job, load_job_settings(job), {"run": True, "monitor": True})
    found = file_digests(tree)
    for text in {*texts_in(tree), *job.options}:
        if os.path.isfile(text):
            found[text] = file_digest(Path(text))
        elif os.path.isfile(os.path.join(text, "config.json")):
            found[text] = model_digest(Path(text))
    return dict(sorted(found.items()))


class Pipeline:
    """The jobs with what is known of each, which is kept in a file of the pipeline's folder."""

    def __init__(self, settings: PipelineSettings, jobs: Sequence[StageJob]) -> None:
        """Read what was done before. Raises UserError for jobs that were begun with other settings."""
        self.settings, self.jobs = settings, jobs
        self._digests = digests(jobs, check_jobs(jobs))
        self._file = settings.folder / RECORDS
        self.records = present_records(jobs, read_records(self._file)) if self._file.exists() else {}
        check_records(jobs, self._digests, self.records)
        for job in jobs:
            if job.name in self.records:
                check_inputs(job, self.records[job.name], input_digests(job))

    def state(self, job: StageJob) -> str:
        """Return how far a job is, in a word."""
        record = self.records.get(job.name)
        return "to do" if record is None else "done" if record.done and job.result.exists() else "begun"

    def check(self, ranks: int | None, starts: bool) -> None:
        """Check what is not done, see `check_ahead`, before anything starts. Raises UserError."""
        done = {job.name for job in self.jobs if self.state(job) == "done"}
        if inputs := read_inputs(self.jobs, done):
            check_ahead(inputs, ranks, starts)

    def run(self, ranks: int | None) -> int:
        """Run what is not done; return the exit status: 0 when all is, STOPPED, or that of the first job that fails.

        Raises UserError where another process runs them.
        """
        with self._locked():
            return self._run_jobs(ranks)

    def _run_jobs(self, ranks: int | None) -> int:
        for job in self.jobs:
            record = self.records.get(job.name) or Record(self._digests[job.name], job.settings)
            inputs = input_digests(job)
            check_inputs(job, record, inputs)  # a former job may have been done anew
            if self.state(job) == "done":
                continue
            begun = replace(record, inputs={**inputs, **record.inputs}, done=False)
            self._keep(job, begun)
            print(f"pipeline: {job.name}", flush=True)
            started = time.monotonic()
            status, stopped = _run(job.arguments(ranks))
            seconds = begun.seconds + time.monotonic() - started
            done = status == 0 and not stopped and job.result.exists()
            self._keep(job, replace(begun, done=done, seconds=round(seconds, 1)))
            if not done:
                how = "was stopped" if stopped or status == 0 else f"ended with status {status}"
                print(f"pipeline: {job.name} {how}: the same command goes on with it", flush=True)
                return STOPPED if stopped else status or STOPPED
        return 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from running the same jobs."""
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        with (self.settings.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.settings.folder}: another grpo-mp pipeline runs there: wait for it, or stop it"
                ) from error
            yield

    def _keep(self, job: StageJob, record: Record) -> None:
        self.records[job.name] = record
        write_json(self._file, {name: asdict(one) for name, one in self.records.items()})


def read_records(file: Path) -> dict[str, Record]:
    """Return what a pipeline's folder says of its jobs. Raises UserError for another file."""
    tree = read_json(file)
    try:
        return {name: Record(**values) for name, values in tree.items()}
    except (AttributeError, TypeError) as error:
        raise UserError(f"{file}: it says nothing of stages ({error}): move it away") from error


def _run(arguments: Sequence[str]) -> tuple[int, bool]:
    """Run grpo-mp with these arguments; return its status, and whether this process was told to stop meanwhile."""
    command = [sys.executable, "-m", "grpo_mp", *arguments]
    ends_with_this = partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL)  # it would go on where nobody sees it
    with subprocess.Popen(command, preexec_fn=ends_with_this) as process, _forwarding(process) as told:
        while True:
            try:
                status = process.wait()
                return (128 - status if status < 0 else status), bool(told)
            except KeyboardInterrupt:  # the terminal has told the command, too
                told.append(signal.SIGINT)


@contextmanager
def _forwarding(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Pass the signals that stop a run on to a command; yield those that came."""
    told: list[int] = []

    def forward(number: int, _: Any) -> None:
        told.append(number)
        process.send_signal(number)

    before: Mapping[int, Any] = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
