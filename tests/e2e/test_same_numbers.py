"""A run on deterministic engines gives the same numbers again, bit for bit, whatever happens to it in between."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.kills import TURNS, evidence
from tests.e2e.conftest import REWARD, Outcome, StartJob, outcome
from tests.e2e.jobs import LAUNCH, Job, read_jsonl, spans

pytestmark = pytest.mark.slow
STEPS = 3
PARTIAL = ("rollout.max_staleness=1", "rollout.tokens_ahead=6")
ASYNC = ("schedule=async", "engine.ranks=1", "rollout.max_staleness=2", "rollout.tokens_ahead=6", "layout={}")
ONE_STEP_OFF = ("schedule=one_step_off", "layout={}")
Start = Callable[..., Job]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same_numbers")


@pytest.fixture(scope="module")
def start(start_job: StartJob, folder: Path) -> Start:
    """Starts a run of a name; evaluations draw two samples of a prompt."""
    (folder / "turns.py").write_text(TURNS)
    (folder / "reward.py").write_text(REWARD)
    reward = f"reward.functions={{{folder / 'reward.py'}:letters: 1.0}}"
    brief = ("run.save_every=1", "data.eval.arithmetic.samples=2", f"run.steps={STEPS}", "engine.deterministic=true")

    def start_run(name: str, schedule: tuple[str, ...], ranks: int = 2) -> Job:
        turns = (f"rollout.function={folder / 'turns.py'}:two_turns",) if schedule is ASYNC else ()
        command = (*LAUNCH[:-1], str(ranks))
        return start_job(f"run.folder={folder / name}", reward, *brief, *schedule, *turns, command=command)

    return start_run


@pytest.fixture(scope="module")
def undisturbed(start: Start) -> Outcome:
    """The run of PARTIAL in the folder `partial`."""
    return outcome(start("partial", PARTIAL))


def check_killed(start: Start, folder: Path, name: str, schedule: tuple[str, ...], rank: int | None) -> None:
    """Kill a rank, or the launcher, in the second step; start the same command again."""
    job = start(name, schedule)
    job.wait_until(lambda: spans(folder / name, 0 if rank is None else rank, "TRAIN") == 2)
    job.signal(signal.SIGKILL, rank=rank)
    killed_job = outcome(job)
    assert (killed_job.status != 0, killed_job.left) == (True, [])
    resumed = outcome(start(name, schedule))
    assert (resumed.status, resumed.err) == (0, "")
    assert "resumes after step 1" in resumed.out
    assert [step["step"] for step in read_jsonl(folder / name / "metrics.jsonl")] == list(range(STEPS + 1))


def test_a_rank_that_is_killed_changes_nothing(undisturbed: Outcome, start: Start, folder: Path) -> None:
    """Responses of the next step are begun before."""
    assert undisturbed.status == 0
    check_killed(start, folder, "partial_killed", PARTIAL, rank=1)
    assert evidence(folder / "partial_killed") == evidence(folder / "partial")
    lags = [step["rollout/weight_version_lag/max"] for step in read_jsonl(folder / "partial" / "metrics.jsonl")[1:]]
    assert lags == [0, 2, 2]  # two updates a step


def test_an_engine_that_is_killed_changes_nothing(undisturbed: Outcome, start: Start, folder: Path) -> None:
    """It holds responses that were begun with the weights before; the other goes on with what was recorded of them."""
    assert undisturbed.status == 0
    job = start("partial_engine", PARTIAL)
    job.wait_until(lambda: spans(folder / "partial_engine", 0, "GENERATE") >= 2)
    job.kill_engine(0)
    ended = outcome(job)
    assert (ended.status, ended.left) == (0, [])
    assert evidence(folder / "partial_engine") == evidence(folder / "partial")


def test_a_launcher_that_is_killed_changes_nothing(start: Start, folder: Path) -> None:
    """The asynchronous run rolls out two turns."""
    assert outcome(start("async", ASYNC)).status == 0
    check_killed(start, folder, "async_killed", ASYNC, rank=None)
    assert evidence(folder / "async_killed") == evidence(folder / "async")
    lags = [step["rollout/weight_version_lag/max"] for step in read_jsonl(folder / "async" / "metrics.jsonl")[1:]]
    assert lags == [0, 2, 4]


def test_one_engine_and_two_give_the_same_numbers(start: Start, folder: Path) -> None:
    """One rank trains; of the engines' ranks there are one, or two."""
    jobs = [("one_engine", 1), ("two_engines", 2)]
    for name, engines in jobs:
        ended = outcome(start(name, (*ONE_STEP_OFF, f"engine.ranks={engines}"), 1 + engines))
        assert (ended.status, ended.err) == (0, "")
        assert read_jsonl(folder / name / "metrics.jsonl")[1]["sync/engines"] == engines
    assert evidence(folder / "one_engine") == evidence(folder / "two_engines")
