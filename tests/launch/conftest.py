"""One cluster for all tests that submit jobs: launch/tiny_moe.sh, what it prints, and its processes."""

import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import TinyRun
from tests.e2e.jobs import MARK, processes_of
from tests.launch.cluster import Cluster, missing_requirement, wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
VENV = Path(sys.prefix)


class BatchJob:
    """`settings` override configs/tiny_moe.yaml. `spares`: submitted by `grpo-mp launch` with so many.

    `options`: of sbatch.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        settings: list[str],
        spares: int = 0,
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self._cluster = cluster
        self._mark = uuid.uuid4().hex
        self._attempts = folder / "run" / "attempts"
        self.log_file = folder / "job.out"
        variables = {MARK: self._mark, "VENV": str(VENV), **environment}
        options = [f"--output={self.log_file}", *options]
        command = ["sbatch", *options, "launch/tiny_moe.sh"]
        if spares:
            launch = [sys.executable, "-m", "grpo_mp", "launch", "configs/tiny_moe.yaml", "--spares", str(spares)]
            command = [*launch, *options]
        output = subprocess.run(
            [*command, *settings],
            env={**cluster.environment, **variables},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        self.id = output.split()[-1]

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def state(self) -> str:
        """As Slurm names it, such as RUNNING."""
        return self._field("JobState")

    @property
    def nodes(self) -> str:
        return self._field("NodeList")

    @property
    def exit_status(self) -> int:
        return int(self._field("ExitCode").partition(":")[0])

    def wait_for(self, text: str) -> None:
        wait_until(
            lambda: text in self.log or self.state in ("FAILED", "COMPLETED"), f"{text!r} in\n{self.log}", TIMEOUT_S
        )
        assert text in self.log, self.log

    def wait_for_a_step_of_attempt(self, restart: int | str) -> None:
        """Return when this attempt, not one before it whose lines the job's output keeps, has trained a step.

        `restart`: number of requeues, or that, a point and the number of restarts since then.
        """
        log = self._attempts / f"{self.id}.{restart}" / "rank_0.log"
        name = f"a step in {log}"
        wait_until(lambda: log.exists() and "  reward " in log.read_text(), name, TIMEOUT_S)

    def wait_end(self) -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        wait_until(lambda: self.state in ended, f"the end of\n{self.log}", TIMEOUT_S)

    def wait_requeued(self) -> None:
        """Return when the job is pending again; then start it soon, which Slurm delays for two minutes.

        A node refuses a job that it ended within the same second.
        """
        wait_until(lambda: self.state == "PENDING", f"a requeue of\n{self.log}", TIMEOUT_S)
        self._cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+5")

    def signal(self) -> None:
        """Send what Slurm sends before the time limit: `--signal=B:USR1@...`."""
        self._cluster.run("scancel", "--signal=USR1", "--batch", self.id)

    def rank(self, number: int) -> psutil.Process:
        ranks = [process for process in self._processes() if "grpo_mp.cli.slurm_task" in " ".join(process.cmdline())]
        return next(rank for rank in ranks if rank.environ().get("SLURM_PROCID") == str(number))

    def remaining_processes(self) -> list[str]:
        """Return the command lines that still run after the time that watchers need."""
        try:
            wait_until(lambda: not self._processes(), "processes to end")
        except AssertionError:
            return [" ".join(process.cmdline()) for process in self._processes()]
        return []

    def _processes(self) -> list[psutil.Process]:
        return processes_of(self._mark)

    def _field(self, name: str) -> str:
        match = re.search(rf"\b{name}=(\S+)", self._cluster.run("scontrol", "show", "job", self.id))
        assert match, name
        return match.group(1)


Submit = Callable[..., BatchJob]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing_requirement():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def submit(cluster: Cluster, tiny_run: TinyRun, tmp_path: Path) -> Submit:
    """Submit launch/tiny_moe.sh with the smallest model, its run folder under tmp_path."""

    def submit_job(*settings: str, spares: int = 0, options: Sequence[str] = (), **environment: str) -> BatchJob:
        inputs = [
            f"run.folder={tmp_path / 'run'}",
            f"model.path={tiny_run.model}",
            f"data.train={tiny_run.train}",
            f"data.eval={{arithmetic: {tiny_run.folder / 'eval.jsonl'}}}",
            "rollout.prompts_per_step=4",
            "rollout.group_size=4",
            "rollout.max_response_tokens=16",
            "sync.check_tolerance=1.0e-4",
        ]
        return BatchJob(cluster, tmp_path, [*inputs, *settings], spares, options, **environment)

    return submit_job
