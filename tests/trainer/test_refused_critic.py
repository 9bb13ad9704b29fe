"""A critic that a start refuses before anything begins."""

import json
import re
import shutil
from pathlib import Path

from tests.conftest import TinyRun
from tests.trainer.conftest import Refuse


def copy_with_other_tokens(model: Path, folder: Path) -> None:
    """Copy a folder, but for two tokens that change places."""
    shutil.copytree(model, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))


def test_another_tokenizer_is_refused_at_the_start(refuse: Refuse, tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = tmp_path / "critic"
    copy_with_other_tokens(tiny_run.model, folder)
    error = refuse("algorithm=ppo", f"critic.path={folder}")
    assert f"critic.path={folder}: its tokenizer is another than the policy's" in error


def test_a_warm_up_that_lasts_all_epochs_is_refused_at_the_start(refuse: Refuse) -> None:
    error = refuse("algorithm=ppo", "critic.warmup_steps=100", "run.steps=0", "run.epochs=1")
    assert re.search(r"critic.warmup_steps=100 leaves none of \d+ steps to the policy", error)


def test_a_folder_that_is_not_there_is_refused_at_the_start(refuse: Refuse, tmp_path: Path) -> None:
    error = refuse("algorithm=ppo", f"critic.path={tmp_path / 'none'}")
    assert f"{tmp_path / 'none' / 'config.json'} does not exist: download the model" in error
