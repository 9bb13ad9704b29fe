"""A run on deterministic engines gives the same numbers again, bit for bit, whatever happens to it in between."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_mp.rollout.dump import read_groups
from tests.bench.kills import TURNS, evidence
from tests.e2e.conftest import REWARD, Outcome, StartJob, outcome, run_well
from tests.e2e.jobs import ALONE, LAUNCH, Job, read_jsonl, spans
from tests.e2e.test_replay import OF_ROLLOUTS, weights
from tools.tiny.arithmetic import vocabulary_words
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = pytest.mark.slow
STEPS = 3
PARTIAL = ("rollout.max_staleness=1", "rollout.tokens_ahead=6")
ASYNC = ("schedule=async", "engine.ranks=1", "rollout.max_staleness=2", "rollout.tokens_ahead=6", "layout={}")
# There is room for the second turn; what was rolled out is dumped.
TWO_TURNS = ("rollout.dump=true", "rollout.limits.turn_tokens=6", "rollout.max_response_tokens=32")
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

    def start_run(
        name: str,
        schedule: tuple[str, ...],
        ranks: int = 2,
        more: tuple[str, ...] = (),
        command: tuple[str, ...] | None = None,
    ) -> Job:
        turns = (f"rollout.function={folder / 'turns.py'}:two_turns", *TWO_TURNS) if schedule is ASYNC else ()
        command = command or (*LAUNCH[:-1], str(ranks))
        return start_job(f"run.folder={folder / name}", reward, *brief, *schedule, *turns, *more, command=command)

    return start_run


@pytest.fixture(scope="module")
def undisturbed(start: Start) -> Outcome:
    """The run of PARTIAL in the folder `partial`."""
    return outcome(start("partial", PARTIAL))


def check_killed(start: Start, folder: Path, name: str, schedule: tuple[str, ...], rank: int | None) -> None:
    """Kill a rank, or the launcher, in the second step; start the same command again."""
    job = start(name, schedule)
    job.wait_until(lambda: spans(folder / name, 0 if rank is None else rank, "TRAIN") >= 2)
    job.signal(signal.SIGKILL, rank=rank)
    killed_job = outcome(job)
    assert (killed_job.status != 0, killed_job.left) == (True, [])
    assert re.search(r"resumes after step [12]\b", run_well(start(name, schedule)).out)
    assert [step["step"] for step in read_jsonl(folder / name / "metrics.jsonl")] == list(range(STEPS + 1))


@pytest.mark.nightly  # the short form of the kills bench kills a process, too
def test_a_rank_that_is_killed_changes_nothing(undisturbed: Outcome, start: Start, folder: Path) -> None:
    """Responses of the next step are begun before."""
    assert undisturbed.status == 0
    check_killed(start, folder, "partial_killed", PARTIAL, rank=1)
    assert evidence(folder / "partial_killed") == evidence(folder / "partial")


def check_engine_killed(start: Start, folder: Path, name: str, more: tuple[str, ...] = ()) -> None:
    """Kill an engine in the second step of a run like the undisturbed one in the folder `name`."""
    job = start(f"{name}_engine", PARTIAL, more=more)
    job.wait_until(lambda: spans(folder / f"{name}_engine", 0, "GENERATE") >= 2)
    job.kill_engine(0)
    ended = outcome(job)
    assert (ended.status, ended.left) == (0, [])
    assert evidence(folder / f"{name}_engine") == evidence(folder / name)
    lags = [step["rollout/weight_version_lag/max"] for step in read_jsonl(folder / name / "metrics.jsonl")[1:]]
    assert lags == [0, 2, 2]  # two updates a step


def test_an_engine_that_is_killed_changes_nothing(undisturbed: Outcome, start: Start, folder: Path) -> None:
    """It holds responses that were begun with the weights before; the other goes on with what was recorded of them."""
    assert undisturbed.status == 0
    check_engine_killed(start, folder, "partial")


@pytest.mark.nightly  # rollout/test_engine_states.py has what the engine does
def test_an_engine_with_recurrent_states_that_is_killed_changes_nothing(start: Start, folder: Path) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32}
    make_tiny(folder / "hybrid_model", "qwen3_5_moe_text", make_tokenizer(vocabulary_words()), **shape)
    more = (f"model.path={folder / 'hybrid_model'}",)
    assert outcome(start("hybrid", PARTIAL, more=more)).status == 0
    check_engine_killed(start, folder, "hybrid", more)


@pytest.fixture(scope="module")
def asynchronous(start: Start) -> Outcome:
    """The run of ASYNC in the folder `async`."""
    return outcome(start("async", ASYNC))


@pytest.mark.nightly
@pytest.mark.parametrize(("phase", "begun"), [("TRAIN", 1), ("SYNC", 4)])
def test_the_only_engine_that_is_killed_changes_nothing(
    phase: str, begun: int, asynchronous: Outcome, start: Start, folder: Path
) -> None:
    """It is started again with the weights that it had, which the policy may have no more, or is waited for."""
    assert asynchronous.status == 0
    name = f"async_engine_{phase}"
    job = start(name, ASYNC)
    job.wait_until(lambda: spans(folder / name, 0, phase) >= begun)
    job.kill_engine(0)
    ended = outcome(job)
    assert (ended.status, ended.left) == (0, [])
    assert evidence(folder / name) == evidence(folder / "async")


@pytest.mark.nightly
def test_a_launcher_that_is_killed_changes_nothing(asynchronous: Outcome, start: Start, folder: Path) -> None:
    """The asynchronous run rolls out two turns; the dump of its episodes trains the same policy, without engines."""
    assert asynchronous.status == 0
    check_killed(start, folder, "async_killed", ASYNC, rank=None)
    assert evidence(folder / "async_killed") == evidence(folder / "async")
    lags = [step["rollout/weight_version_lag/max"] for step in read_jsonl(folder / "async" / "metrics.jsonl")[1:]]
    assert lags == [0, 2, 4]
    check_replay(start, folder / "async", folder / "replayed")


def check_replay(start: Start, run: Path, folder: Path) -> None:
    """What episodes were given is masked."""
    dump = run / "rollouts_dump"
    groups = [group for file in dump.rglob("*.parquet") for group, _ in read_groups(file)]
    samples = [sample for group in groups for sample in group.samples]
    assert samples
    assert all(0 < sample.given_tokens < len(sample.tokens) for sample in samples)
    run_well(start(folder.name, ASYNC, command=ALONE, more=("--replay", str(dump))))
    steps, again = (read_jsonl(one / "metrics.jsonl")[-STEPS:] for one in (run, folder))
    for one, other in zip(steps, again, strict=True):
        assert {name: one[name] for name in other if name.startswith(OF_ROLLOUTS)} == {
            name: value for name, value in other.items() if name.startswith(OF_ROLLOUTS)
        }
    before = weights(run)
    after = weights(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.nightly
def test_one_engine_and_two_give_the_same_numbers(start: Start, folder: Path) -> None:
    """One rank trains; of the engines' ranks there are one, or two."""
    jobs = [("one_engine", 1), ("two_engines", 2)]
    for name, engines in jobs:
        run_well(start(name, (*ONE_STEP_OFF, f"engine.ranks={engines}"), 1 + engines))
        assert read_jsonl(folder / name / "metrics.jsonl")[1]["sync/engines"] == engines
    assert evidence(folder / "one_engine") == evidence(folder / "two_engines")
