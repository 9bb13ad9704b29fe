"""One real run, interrupted and gone on with, that many tests look at; and jobs for those that end badly."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_mp.checkpoint.run_lock import run_lock
from grpo_mp.utils.errors import UserError
from tests.conftest import TinyRun
from tests.e2e.jobs import LAUNCH, Job, read_jsonl, spans

LAST_STEP = 4
REWARD = """
def letters(completions, log_metric, log_extra, **_):
    rewards = [sum(map(str.isalpha, text)) / 10 for text in completions]
    log_metric("most_letters", max(rewards))
    log_extra("first word", [text.split(" ")[0] for text in completions])
    return rewards
"""
# The same, but in the second step it waits for a file `go`, and leaves one for each rank that does.
HELD_REWARD = """
import os, time
from pathlib import Path

def letters(completions, log_metric, log_extra, trainer_state, **_):
    folder = Path(__file__).parent
    while trainer_state.global_step == 2 and not (folder / "go").exists():
        (folder / f"held_{os.environ['RANK']}").touch()
        time.sleep(0.02)
    rewards = [sum(map(str.isalpha, text)) / 10 for text in completions]
    log_metric("most_letters", max(rewards))
    log_extra("first word", [text.split(" ")[0] for text in completions])
    return rewards
"""
StartJob = Callable[..., Job]


@dataclass(frozen=True)
class Outcome:
    """How a job ended and what it said."""

    status: int
    out: str
    err: str
    left: list[str]  # processes


@dataclass(frozen=True)
class FinishedRun:
    """The first job, held in its second step, got SIGUSR1 at its end.

    The second, the same command to one more step, ended by itself.
    """

    folder: Path
    first: Outcome
    second: Outcome
    stopped_after: int
    stopped_report: str  # the page that the first job left
    listening: list[str]  # addresses of the first job's sockets in TRAIN
    answers: dict[int, bytes]  # of each port, to another user without a key; empty where this is not root's
    second_job: str  # what a job is told that would write there, too


@pytest.fixture(scope="session")
def start_job(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartJob]:
    """Starts two ranks on the tiny inputs, with settings laid over them."""
    jobs: list[Job] = []

    def start(*overrides: str, command: Sequence[str] = LAUNCH) -> Job:
        folder = tmp_path_factory.mktemp("job")
        jobs.append(Job(folder, [str(tiny_run.config), *overrides], command))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def finished_run(start_job: StartJob, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "reward.py").write_text(HELD_REWARD)
    run = folder / "run"
    settings = finished_settings(folder)
    job = start_job(*settings, f"run.steps={LAST_STEP - 1}")
    held = [folder / f"held_{rank}" for rank in (0, 1)]
    job.wait_until(lambda: all(file.exists() for file in held))  # the engines answer meanwhile, and nothing changes
    listening = job.listening()
    answers = job.answers_to_strangers() if os.geteuid() == 0 else {}
    with pytest.raises(UserError) as refusal, run_lock(run, wait_s=0.0):
        pass
    (folder / "go").touch()
    job.wait_until(lambda: spans(run, 1, "TRAIN") >= 2)
    job.signal(signal.SIGUSR1, rank=1)
    first = outcome(job)
    stopped_after = len(read_jsonl(run / "metrics.jsonl")) - 1  # besides the line of step 0
    page = (run / "report.html").read_text() if (run / "report.html").exists() else ""
    second = outcome(start_job(*settings, f"run.steps={LAST_STEP}"))
    return FinishedRun(folder, first, second, stopped_after, page, listening, answers, str(refusal.value))


def finished_settings(folder: Path) -> tuple[str, ...]:
    """With these, one run writes every metric of the dictionary."""
    return (
        f"run.folder={folder / 'run'}",
        f"reward.functions={{{folder / 'reward.py'}:letters: 1.0}}",
        "algorithm.kl.target=0.05",
        "data.eval.arithmetic.samples=2",
        "run.export_every=2",
        "training.router_replay=R3",
        "rollout.dump=true",
        "monitor.report=true",
        "reward.timeout_s=600",
    )


def letters_reward(folder: Path) -> str:
    """Write the reward, in which samples of any model differ; return the setting that makes it the only one."""
    (folder / "reward.py").write_text(REWARD)
    return f"reward={{functions: {{{folder / 'reward.py'}:letters: 1.0}}}}"


def run_well(job: Job) -> Outcome:
    """Wait for a job that must end well, without a word on stderr, and leave no process."""
    ended = outcome(job)
    assert (ended.status, ended.err, ended.left) == (0, "", []), f"{ended.out[-2000:]}\n{ended.err}"
    return ended


def outcome(job: Job) -> Outcome:
    """Wait for the job's end, and a little for what dies of it."""
    status = job.wait()
    assert "terminate called" not in job.err  # C++ of a rank, where no exception is caught
    return Outcome(status, job.out, job.err, job.left())
