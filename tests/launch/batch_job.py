"""A job of launch/tiny_moe.sh on the test cluster: submitted, watched by what it prints, and found to be gone."""

import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from tests.e2e.jobs import MARK, processes_of
from tests.launch.cluster import Cluster, wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
OWN_ENVIRONMENT = Path(sys.prefix)


class BatchJob:
    """`settings` are laid over configs/tiny_moe.yaml."""

    def __init__(self, cluster: Cluster, folder: Path, settings: list[str], **environment: str) -> None:
        self._cluster, self._mark = cluster, uuid.uuid4().hex
        self._log = folder / "job.out"
        more = {MARK: self._mark, "VENV": str(OWN_ENVIRONMENT), **environment}
        answer = subprocess.run(
            ["sbatch", f"--output={self._log}", "launch/tiny_moe.sh", *settings],
            env={**cluster.environment, **more},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        self.id = answer.split()[-1]

    @property
    def out(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def state(self) -> str:
        """Slurm's word, such as RUNNING."""
        return self._field("JobState")

    @property
    def nodes(self) -> str:
        return self._field("NodeList")

    @property
    def exit_status(self) -> int:
        return int(self._field("ExitCode").partition(":")[0])

    def wait_for(self, text: str) -> None:
        """Return when the job has printed it."""
        wait_until(
            lambda: text in self.out or self.state in ("FAILED", "COMPLETED"), f"{text!r} in\n{self.out}", LIMIT_S
        )
        assert text in self.out, self.out

    def wait_end(self) -> None:
        """Return when the job has ended for good."""
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        wait_until(lambda: self.state in ended, f"the end of\n{self.out}", LIMIT_S)

    def wait_requeued(self) -> None:
        """Return when it waits again; then let it start soon, which Slurm puts off for two minutes.

        A node refuses a job that it ended within the same second.
        """
        wait_until(lambda: self.state == "PENDING", f"a requeue of\n{self.out}", LIMIT_S)
        self._cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+5")

    def signal(self) -> None:
        """As Slurm does some time before the limit: `--signal=B:USR1@...`."""
        self._cluster.run("scancel", "--signal=USR1", "--batch", self.id)

    def rank(self, number: int) -> psutil.Process:
        """The process of one rank."""
        task = re.compile(r"grpo_mp\.launch\.task")
        ranks = [process for process in self._processes() if task.search(" ".join(process.cmdline()))]
        return next(rank for rank in ranks if rank.environ().get("SLURM_PROCID") == str(number))

    def left(self) -> list[str]:
        """What still runs of it after the time that watchers need."""
        try:
            wait_until(lambda: not self._processes(), "processes to end")
        except AssertionError:
            return [" ".join(process.cmdline()) for process in self._processes()]
        return []

    def _processes(self) -> list[psutil.Process]:
        return processes_of(self._mark)

    def _field(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self._cluster.run("scontrol", "show", "job", self.id))
        assert found, name
        return found.group(1)
