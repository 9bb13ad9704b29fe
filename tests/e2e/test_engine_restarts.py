"""Engines that are killed come back: the run goes on with every group once, and leaves nothing behind."""

import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Outcome, StartJob, letters_reward, outcome
from tests.e2e.jobs import LAUNCH, SLEEPING, TORCHRUN, Job, read_jsonl, spans

pytestmark = pytest.mark.nightly
STEPS = 5
# It waits where the rank of an engine has a file hold_RANK, and lists the ranks of the groups that it has scored.
HELD_REWARD = """
import os, time
from pathlib import Path

def letters(completions, **_):
    rank, folder = os.environ["RANK"], Path(__file__).parent
    while (folder / f"hold_{rank}").exists():
        (folder / f"held_{rank}").touch()
        time.sleep(0.02)
    with (folder / "scored").open("a") as file:
        file.write(rank)
    return [sum(map(str.isalpha, text)) / 10 for text in completions]
"""


@pytest.fixture
def start(start_job: StartJob, tmp_path: Path) -> Callable[..., Job]:
    """Start a job in tmp_path/run with a reward in which samples differ."""
    brief = (f"run.steps={STEPS}", "run.export=false", "run.eval_every=2")
    common = (f"run.folder={tmp_path / 'run'}", letters_reward(tmp_path), *brief)

    def run(*overrides: str, command: tuple[str, ...] = LAUNCH) -> Job:
        return start_job(*common, *overrides, command=command)

    return run


def check_steps(run: Path) -> None:
    steps = read_jsonl(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    for step in steps:
        assert step["sync/check/logprob_abs_diff/mean"] <= 1e-4
        assert ("eval/arithmetic/reward" in step) == (step["step"] in (0, 2, 4, STEPS))
    for step in steps[1:]:
        assert step["rollout/groups"] == 4
        assert step["train/samples_seen"] == 16 * step["step"]


@pytest.mark.parametrize(
    ("phase", "command"),
    [
        ("SYNC", LAUNCH),
        ("EVAL", LAUNCH),
        ("SLEEP", SLEEPING),
        ("WAKE", SLEEPING),
    ],
)
def test_a_killed_engine_comes_back(
    start: Callable[..., Job], tmp_path: Path, phase: str, command: tuple[str, ...]
) -> None:
    """It is killed at a random moment of the phase, or a little after; the other one takes its groups."""
    job = start(command=command)
    run = tmp_path / "run"
    job.wait_until(lambda: spans(run, 1, phase) >= 2)
    job.kill_engine(Random(phase).randrange(2))
    assert outcome(job) == Outcome(0, job.out, job.err, [])
    assert "it is started again" in job.err
    check_steps(run)


def test_an_engine_that_hangs_comes_back(start: Callable[..., Job], tmp_path: Path) -> None:
    """It is stopped while it has a group to begin: at the limit of the group its health check says so."""
    (tmp_path / "reward.py").write_text(HELD_REWARD)
    settings = ("engine.concurrent_groups=1", "rollout.prompts_per_step=8", "run.eval_every=0", "run.steps=2")
    checks = ("rollout.group_timeout_s=60", "reward.timeout_s=300")
    job = start(*settings, *checks, "algorithm.filter.zero_std=keep")
    run = tmp_path / "run"
    holds = [tmp_path / f"hold_{rank}" for rank in range(2)]
    job.wait_until(lambda: spans(run, 0, "TRAIN"))
    for hold in holds:
        hold.touch()
    job.wait_until(lambda: all((tmp_path / f"held_{rank}").exists() for rank in range(2)))
    job.kill_engine(1, signal.SIGSTOP)
    holds[1].unlink()  # its rank asks for the next group
    job.wait_until(lambda: "it is started again" in job.err)
    holds[0].unlink()
    assert outcome(job) == Outcome(0, job.out, job.err, [])
    assert "engine 1: /health_generate" in job.err
    steps = read_jsonl(run / "metrics.jsonl")
    assert [(step["rollout/groups"], step["train/samples_seen"]) for step in steps[1:]] == [(8, 32), (8, 64)]


def test_the_only_engine_comes_back(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("schedule=async", "engine.ranks=1", "layout={}")
    run = tmp_path / "run"
    job.wait_until(lambda: spans(run, 0, "TRAIN") >= 2)
    job.kill_engine(0)
    assert outcome(job) == Outcome(0, job.out, job.err, [])
    assert "it is started again" in job.err
    check_steps(run)


def test_an_engine_that_dies_too_often_ends_the_run(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("engine.max_restarts=1", "run.steps=1000")
    run = tmp_path / "run"
    job.wait_until(lambda: spans(run, 0, "TRAIN") > 1)
    job.kill_engine(1)
    job.wait_until(lambda: "started again" in job.err)
    done = spans(run, 0, "TRAIN")
    job.wait_until(lambda: spans(run, 0, "TRAIN") > done + 1)
    job.kill_engine(1)
    ended = outcome(job)
    assert ended.status == 2
    assert "(started again 1 times: engine.max_restarts)" in ended.err
    assert ended.left == []


def test_a_second_sync_repairs_an_engine_with_one_wrong_tensor(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(command=(*TORCHRUN[:-1], "tests.e2e.corrupt_weights"))
    assert outcome(job) == Outcome(0, job.out, job.err, [])
    assert "disagrees with the policy" in job.err
    assert "a second sync repaired it" in job.err
    assert "it is started again" not in job.err
    steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert all(step["sync/check/logprob_abs_diff/mean"] <= 1e-4 for step in steps[1:])
