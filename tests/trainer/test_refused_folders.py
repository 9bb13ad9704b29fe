"""Run folders that a start refuses, or takes as they are: one sentence, status 2, nothing written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.checkpoint.run_state import (
    TrainState,
    begin_checkpoint,
    checkpoint_folder,
    claim_run_folder,
    write_manifest,
)
from grpo_mp.config import dump_settings, load_settings
from grpo_mp.data.prompts import load_train_prompts
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.train import main
from tests.conftest import TinyRun
from tests.trainer.conftest import Refuse


@pytest.fixture
def saved_run(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A run folder with a checkpoint after step 2, whose policy is one small file."""
    run = tmp_path / "run"
    claim_run_folder(run, dump_settings(load_settings(tiny_run.config, [f"run.folder={run}"])))
    checkpoint = checkpoint_folder(run, 2)
    begin_checkpoint(checkpoint)
    (checkpoint / "policy").mkdir()
    (checkpoint / "policy" / "rank_00000.bin").write_bytes(b"weights")
    write_manifest(checkpoint, TrainState(step=2))
    return run


def test_a_folder_of_other_settings(refuse: Refuse, saved_run: Path) -> None:
    message = refuse("optimizer.eps=0.5")
    assert message.startswith(f"{saved_run} holds a run of other settings (optimizer.eps was 1e-08, is now 0.5)")
    assert message.endswith("choose another run.folder, or move it away")


def test_checkpoints_without_resume_are_refused(refuse: Refuse, saved_run: Path) -> None:
    assert "has checkpoints of this run: set run.resume=auto" in refuse("run.resume=never")


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"weigh")])
def test_a_torn_checkpoint_to_resume_from(refuse: Refuse, saved_run: Path, damage: Callable[[Path], Any]) -> None:
    damage(saved_run / "checkpoints" / "step_000002" / "policy" / "rank_00000.bin")
    message = refuse()
    assert "step_000002: damaged checkpoint, policy/rank_00000.bin is missing or cut short: copy it again" in message
    assert message.endswith("or rename step_000002 to resume from the one before")


def test_a_manifest_of_something_else(refuse: Refuse, saved_run: Path) -> None:
    (saved_run / "checkpoints" / "step_000002" / "manifest.json").write_text("{}")
    assert "manifest.json: not a checkpoint manifest" in refuse()


def test_other_rows_than_those_of_the_steps_before(
    refuse: Refuse, saved_run: Path, tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start on the same rows is taken: the digest that it would be compared with is that of the data."""
    settings = load_settings(tiny_run.config)
    tokenizer = read_tokenizer(settings.model.path, settings.model.read_config())
    train = load_train_prompts(settings.data, tokenizer, settings.rollout.max_prompt_tokens)
    for data in (train.digest, "another"):
        checkpoint = saved_run / "checkpoints" / "step_000002"
        write_manifest(checkpoint, TrainState(step=2, data=data))
        if data == train.digest:
            main([str(tiny_run.config), f"run.folder={saved_run}", "--dry-run", "--ranks", "2"])
            assert capfd.readouterr().err == ""
    assert refuse().startswith(f"{saved_run}: the rows of data.train are no longer those of the run's first 2 steps")


def test_an_export_that_would_take_the_place_of_its_source(refuse: Refuse, tiny_run: TinyRun, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.model, tmp_path / "run" / "final")
    words = "the export would take the place of model.path: choose another run.folder, or set run.export=false"
    assert words in refuse(f"model.path={tmp_path / 'run' / '..' / 'run' / 'final'}")


def test_a_run_folder_that_is_a_file(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert "is not a folder that can be written to: choose another run.folder" in refuse()


def test_what_may_change_between_attempts(
    saved_run: Path, tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = ("run.steps=9", "run.save_every=5")
    main([str(tiny_run.config), f"run.folder={saved_run}", *changed, "--dry-run", "--ranks", "2"])
    assert capfd.readouterr().err == ""


def test_folder_without_steps_is_reused(saved_run: Path, tiny_run: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(saved_run / "checkpoints")
    main([str(tiny_run.config), f"run.folder={saved_run}", "optimizer.lr=0.5", "--dry-run", "--ranks", "2"])
    assert capfd.readouterr().err == ""
