"""What a batch script asks before and after an attempt: after which step it begins, and whether another may follow."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from grpo_mp.checkpoint.run_state import (
    MANIFEST,
    SETTINGS,
    TrainState,
    checkpoint_folder,
    write_manifest,
)
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
    """Write a checkpoint of a file of 9 bytes."""
    folder = checkpoint_folder(run_folder, step)
    (folder / "policy").mkdir(parents=True)
    (folder / SHARD).write_bytes(b"123456789")
    write_manifest(folder, TrainState(step=step))
    return folder


def log_steps(run_folder: Path, first_step: int, steps: Iterable[int], seconds: float) -> None:
    """Write metrics as a run does that resumes before `first_step`."""
    logger = JsonLinesLogger(run_folder, first_step, {})
    for step in steps:
        logger.scalars(step, {"time/step_s": seconds})
    logger.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: (folder / SHARD).write_bytes(b"1234"),
    "missing": lambda folder: (folder / SHARD).unlink(),
    "no JSON": lambda folder: (folder / MANIFEST).write_text('{"state": {'),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_attempt_begins_after_the_newest_checkpoint_that_reads(damage: str, ask: Ask, run_folder: Path) -> None:
    """The ranks find the damage, say so, and resume from the one before."""
    save(run_folder, 10)
    newest = save(run_folder, 20)
    assert begin(ask, run_folder / "attempts" / "7.0") == 20
    DAMAGES[damage](newest)
    assert begin(ask, run_folder / "attempts" / "7.1") == 10
    assert ask("has-steps-left", steps=20) == 0
    assert ask("has-steps-left", steps=10) == job.NO


def test_an_attempt_begins_where_no_checkpoint_reads(ask: Ask, run_folder: Path) -> None:
    """It is the ranks that say what is damaged."""
    DAMAGES["cut"](save(run_folder, 10))
    assert begin(ask, run_folder / "attempts" / "7.0") == 0
    assert ask("has-steps-left") == 0


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


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\xff"])
def test_an_attempt_whose_step_cannot_be_read_counts_as_one_after_the_present_step(
    content: bytes, ask: Ask, run_folder: Path
) -> None:
    """A host that crashes leaves such files; a job is neither blocked by them nor started for ever."""
    save(run_folder, 10)
    attempts = run_folder / "attempts"
    assert begin(ask, attempts / "7.0", restarts=1) == 10
    (attempts / "7.0" / job.SAVED_STEP).write_bytes(content)
    assert begin(ask, attempts / "7.1", restarts=1) == 10
    with pytest.raises(UserError, match="2 attempts of job 7 began after step 10"):
        begin(ask, attempts / "7.2", restarts=1)


def test_files_of_an_attempt_are_complete_or_absent(
    ask: Ask, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the first byte that must be on it."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    attempt = run_folder / "attempts" / "7.0"
    with pytest.raises(UserError, match=r"attempts/7\.0/\w+: No space left on device"):
        begin(ask, attempt)
    assert list(attempt.iterdir()) == []


@pytest.fixture
def attempt(ask: Ask, run_folder: Path) -> Path:
    """An attempt that begins after step 10, where one before it was killed after step 15, and whose rank failed."""
    save(run_folder, 10)
    log_steps(run_folder, 0, range(16), seconds=1.0)
    attempt = run_folder / "attempts" / "7.1"
    begin(ask, attempt)
    (attempt / "rank_0.error.json").write_text(json.dumps({"message": {"message": "ValueError: odd"}}))
    return attempt


def test_steps_of_an_earlier_attempt_do_not_count(attempt: Path, ask: Ask) -> None:
    assert ask("may-restart", attempt) == job.NO


@pytest.mark.parametrize(("last", "status"), [(10, job.NO), (11, 0), (15, 0), (30, 0)])
def test_steps_of_the_attempt_count(last: int, status: int, attempt: Path, ask: Ask, run_folder: Path) -> None:
    """Also where they are fewer than those that the earlier attempt did; 10: it failed in its first step."""
    log_steps(run_folder, 11, range(11, last + 1), seconds=2.0)
    assert ask("may-restart", attempt) == status


def test_steps_after_a_checkpoint_that_the_ranks_set_aside_count(attempt: Path, ask: Ask, run_folder: Path) -> None:
    """Until they have, `begin` counts from it."""
    newest = checkpoint_folder(run_folder, 10)
    newest.rename(newest.with_name(f"{newest.name}.damaged"))
    log_steps(run_folder, 1, range(1, 4), seconds=2.0)
    assert ask("may-restart", attempt) == 0


@pytest.mark.parametrize("damage", [lambda file: file.write_text(""), Path.unlink])
def test_an_attempt_whose_own_files_are_damaged_may_be_followed_by_another(
    damage: Callable[[Path], object], attempt: Path, ask: Ask, run_folder: Path
) -> None:
    log_steps(run_folder, 11, range(11, 16), seconds=2.0)
    for name in (job.SAVED_STEP, job.METRICS_BEFORE):
        damage(attempt / name)
    assert ask("may-restart", attempt) == 0


@pytest.mark.parametrize("srun", ["", "srun: error: n2: task 1: Killed\n"])
@pytest.mark.parametrize(("faulty_ranks", "status"), [(None, job.NO), ([], job.NO), ([1], 0)])
def test_a_stop_on_purpose_is_not_undone_but_for_a_faulty_node(
    faulty_ranks: list[int] | None, status: int, srun: str, attempt: Path, ask: Ask, run_folder: Path
) -> None:
    """However many steps were done, and saved, before."""
    log_steps(run_folder, 11, range(11, 20), seconds=2.0)
    save(run_folder, 18)
    assert (ask("may-restart", attempt), is_stop(attempt)) == (0, job.NO)
    values = {"message": {"message": "error: step 20"}, "rank": 0, "may_restart": False}
    more = {} if faulty_ranks is None else {"faulty_ranks": faulty_ranks}
    (attempt / "rank_0.error.json").write_text(json.dumps(values | more))
    (attempt / job.TRAIN_LOG).write_text(srun)
    assert (ask("may-restart", attempt), is_stop(attempt)) == (status, 0)


def is_stop(attempt: Path) -> int:
    return job.run_command(job._parser().parse_args(["stopped-on-purpose", str(attempt)]))


def test_a_killed_attempt_may_be_followed_by_another(attempt: Path, ask: Ask) -> None:
    (attempt / job.TRAIN_LOG).write_text("srun: error: n2: task 1: Killed\n")
    assert ask("may-restart", attempt) == 0


def test_a_fine_tuning_by_epochs_has_the_steps_that_its_folder_says(tmp_path: Path) -> None:
    """Else a job that has finished would be requeued."""
    settings = load_sft_settings(Path("configs/tiny_sft.yaml"), [f"run.folder={tmp_path}"])
    assert settings.run.steps == 0
    assert job.total_steps(settings) == math.inf
    (tmp_path / SETTINGS).write_text(dump_settings(settings.with_steps(1000)))
    assert job.total_steps(settings) == 8
    more = load_sft_settings(Path("configs/tiny_sft.yaml"), [f"run.folder={tmp_path}", "sft.epochs=2"])
    assert job.total_steps(more) == math.inf
