"""What a batch script asks before and after an attempt: after which step it begins, and whether another may follow."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from grpo_mp.checkpoint.run_state import SETTINGS, TrainState, checkpoint_folder, write_manifest
from grpo_mp.cli import slurm_job as job
from grpo_mp.config import dump_settings, load_sft_settings
from grpo_mp.monitor.loggers import JsonLinesLogger
from grpo_mp.utils.errors import UserError
from tests.conftest import TinyRun

SHARD = "policy/rank_00000.bin"
Ask = Callable[..., int]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ask(tiny_run: TinyRun, run_folder: Path) -> Ask:
    """Answer a command of a batch script by the status that `run_command` returns."""

    def answer(command: str, *arguments: object, steps: int = 100) -> int:
        settings = [str(tiny_run.config), f"run.folder={run_folder}", f"run.steps={steps}"]
        return job.run_command(job._parser().parse_args([command, *map(str, arguments), *settings]))

    return answer


def begin(ask: Ask, attempt: Path, restarts: int = 3) -> int:
    """Begin an attempt; return the step after which it does."""
    assert ask("begin", "--restarts", restarts, attempt) == 0
    return int((attempt / job.SAVED_STEP).read_text())


def save(run_folder: Path, step: int) -> Path:
    folder = checkpoint_folder(run_folder, step)
    (folder / "policy").mkdir(parents=True)
    (folder / SHARD).write_bytes(b"123456789")
    write_manifest(folder, TrainState(step=step))
    return folder


def log_steps(run_folder: Path, first_step: int, steps: Iterable[int]) -> None:
    """Write metrics as a run does that resumes before `first_step`."""
    logger = JsonLinesLogger(run_folder, first_step, {})
    for step in steps:
        logger.scalars(step, {"time/step_s": 1.0})
    logger.close()


def test_an_attempt_begins_after_the_newest_checkpoint_that_reads(ask: Ask, run_folder: Path) -> None:
    """The ranks find the damage, say so, and resume from the one before."""
    save(run_folder, 10)
    newest = save(run_folder, 20)
    assert begin(ask, run_folder / "attempts" / "7.0") == 20
    (newest / SHARD).write_bytes(b"1234")
    assert begin(ask, run_folder / "attempts" / "7.1") == 10


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_so_many_attempts_begin_after_one_step_and_no_more(restarts: int, ask: Ask, run_folder: Path) -> None:
    """Whether they are restarts in one allocation or requeues."""
    attempts = run_folder / "attempts"
    for step in (0, 10):
        if step:
            save(run_folder, step)
        for number in range(restarts + 1):
            assert begin(ask, attempts / f"7.{step + number}", restarts) == step
        with pytest.raises(UserError, match=rf"{restarts + 1} attempts of job 7 .*RESTARTS={restarts} are allowed"):
            begin(ask, attempts / f"7.{step + restarts + 1}", restarts)
    assert begin(ask, attempts / "8.0", restarts) == 10  # another job


@pytest.fixture
def attempt(ask: Ask, run_folder: Path) -> Path:
    save(run_folder, 10)
    log_steps(run_folder, 0, range(11))
    attempt = run_folder / "attempts" / "7.1"
    begin(ask, attempt)
    fail(attempt)
    return attempt


def fail(attempt: Path, **values: object) -> None:
    (attempt / "rank_0.error.json").write_text(json.dumps({"message": {"message": "ValueError: odd"}} | values))


@pytest.mark.parametrize(("last", "status"), [(10, job.NO), (11, 0), (30, 0)])
def test_a_failure_may_pass_if_a_step_was_done(
    last: int, status: int, attempt: Path, ask: Ask, run_folder: Path
) -> None:
    """10: it failed in its first step."""
    log_steps(run_folder, 11, range(11, last + 1))
    assert ask("failure", attempt) == status


def test_a_killed_attempt_or_one_that_was_told_to_save_is_followed_by_another(attempt: Path, ask: Ask) -> None:
    assert ask("failure", attempt) == job.NO
    assert ask("failure", "--told-to-save", attempt) == 0
    (attempt / job.TRAIN_LOG).write_text("srun: error: n2: task 1: Killed\n")
    assert ask("failure", attempt) == 0


@pytest.mark.parametrize("srun", ["", "srun: error: n2: task 1: Killed\n"])
def test_a_stop_on_purpose_is_not_undone(srun: str, attempt: Path, ask: Ask, run_folder: Path) -> None:
    """However many steps were done before."""
    log_steps(run_folder, 11, range(11, 20))
    fail(attempt, rank=0, may_restart=False)
    (attempt / job.TRAIN_LOG).write_text(srun)
    assert ask("failure", attempt) == ask("failure", "--told-to-save", attempt) == job.NO


def test_the_steps_of_a_run_are_those_in_its_folder(tmp_path: Path, ask: Ask, run_folder: Path) -> None:
    """A run by epochs knows them when it has read its data."""
    settings = load_sft_settings(Path("configs/tiny_sft.yaml"), [f"run.folder={run_folder}"])
    assert settings.run.steps == 0
    run_folder.mkdir()
    (run_folder / SETTINGS).write_text(dump_settings(settings.with_steps(1000)))
    assert ask("has-steps-left") == 0
    save(run_folder, 8)
    assert ask("has-steps-left") == job.NO
