"""Run the jobs of a pipeline one after another; resume after a stop."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.run_lock import run_lock
from grpo_mp.config import PipelineSettings
from grpo_mp.pipeline.stages import StageJob, check_jobs
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_json
from grpo_mp.utils.processes import PR_SET_PDEATHSIG, prctl
from grpo_mp.utils.reading import read_json

RECORDS = "pipeline.json"
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)  # signals on which a run saves and ends


@dataclass(frozen=True)
class Record:
    """Record of a job that has begun: its settings, whether it is done, and its duration."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    seconds: float = 0.0


class Pipeline:
    """The jobs of a pipeline. A file in the pipeline's folder records the progress of each job."""

    def __init__(self, settings: PipelineSettings, jobs: Sequence[StageJob]) -> None:
        """Check the jobs; refuse changed settings of a job that has begun."""
        self.settings = settings
        self.jobs = jobs
        self._file = settings.folder / RECORDS
        self.records = read_records(self._file) if self._file.exists() else {}
        check_jobs([job for job in jobs if self.state(job) != "done"], settings.folder)
        for job in jobs:
            before = self.records[job.name].settings if job.name in self.records and job.folder.exists() else None
            if before is not None and before != dict(job.settings):
                names = [*before, *job.settings]
                changed = next(name for name in names if before.get(name) != job.settings.get(name))
                raise UserError(
                    f"stage {job.name} was {self.state(job)} with {changed}={before.get(changed)!r}: set that, or "
                    f"another folder, or remove {job.folder}"
                )

    def state(self, job: StageJob) -> str:
        """Return "done", "begun" or "to do". A job is done only if all earlier jobs are done."""
        former = self.jobs[: self.jobs.index(job) + 1]
        if all(one.name in self.records and self.records[one.name].done and one.result.exists() for one in former):
            return "done"
        return "begun" if job.name in self.records and job.folder.exists() else "to do"

    def run(self, ranks: int | None) -> int:
        """Run the jobs that are not done; return 0, STOPPED, or the exit status of the first job that fails."""
        with run_lock(self.settings.folder, wait_s=0):
            for job in self.jobs:
                if self.state(job) != "done" and (status := self._run_job(job, ranks)):
                    return status
        return 0

    def _run_job(self, job: StageJob, ranks: int | None) -> int:
        before = self.records.get(job.name, Record()).seconds if job.folder.exists() else 0.0
        self._keep(job, Record(dict(job.settings), seconds=before))
        print(f"pipeline: {job.name}", flush=True)
        started = time.monotonic()
        status, stopped = _run(job.arguments(ranks))
        done = status == 0 and not stopped and job.result.exists()
        self._keep(job, Record(dict(job.settings), done, round(before + time.monotonic() - started, 1)))
        if done:
            return 0
        how = "was stopped" if stopped or status == 0 else f"ended with status {status}"
        print(f"pipeline: {job.name} {how}: the same command resumes it", flush=True)
        return STOPPED if stopped else status or STOPPED

    def _keep(self, job: StageJob, record: Record) -> None:
        self.records[job.name] = record
        write_json(self._file, {name: asdict(one) for name, one in self.records.items()})


def read_records(file: Path) -> dict[str, Record]:
    """Read the records of a pipeline: name of the job -> record."""
    try:
        return {name: Record(**values) for name, values in read_json(file).items()}
    except (AttributeError, TypeError) as error:
        raise UserError(f"{file}: no records of stages ({error}): move it away") from error


def _run(arguments: Sequence[str]) -> tuple[int, bool]:
    """Run grpo-mp; return its exit status, and whether this process received a stop signal meanwhile."""
    command = [sys.executable, "-m", "grpo_mp", *arguments]
    ends_with_this = partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL)  # no stage outlives a killed pipeline
    with subprocess.Popen(command, preexec_fn=ends_with_this) as process, _forwarding(process) as told:
        while True:
            try:
                status = process.wait()
                return (128 - status if status < 0 else status), bool(told)
            except KeyboardInterrupt:  # the terminal also sends Ctrl-C to the command
                told.append(signal.SIGINT)


@contextmanager
def _forwarding(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Forward the FORWARDED signals to a process; yield the list of the received signals."""
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
