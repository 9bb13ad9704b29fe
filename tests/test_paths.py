"""Paths in settings: ~ and environment variables are expanded when the settings are read."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.config import Settings, check_settings, dump_settings, load_settings, load_sft_settings
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/mia")
    monkeypatch.setenv("DISK", "/scratch/7")
    monkeypatch.delenv("NO_SUCH", raising=False)


def read(section: str, name: str, value: Any) -> Settings:
    tree = copy.deepcopy(MINIMAL_SETTINGS)
    tree.setdefault(section, {})[name] = value
    return check_settings(tree, "here")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~/runs/x", "/home/mia/runs/x"),
        ("$DISK/x", "/scratch/7/x"),
        ("${DISK}/x_$HOME", "/scratch/7/x_/home/mia"),
        ("runs/~x", "runs/~x"),
    ],
)
def test_every_kind_of_path_is_expanded(text: str, path: str) -> None:
    assert read("run", "folder", text).run.folder == Path(path)
    assert read("data", "train", text).data.train["train"].path == path
    assert read("data", "eval", {"held": {"path": text}}).data.eval["held"].path == path
    mixture = {"a": {"path": text, "pass_rates": text}, "b": "rows.jsonl"}
    assert read("data", "train", mixture).data.train["a"].pass_rates == path
    assert read("data", "source", f"{text}/a.py:rows").data.source == f"{path}/a.py:rows"


def test_files_of_code_and_arguments_are_expanded_wherever_they_stand() -> None:
    assert read("rollout", "function", "$DISK/a.py:f").rollout.function == "/scratch/7/a.py:f"
    loggers = {"~/a.py:Log": {"folder": "~/logs", "title": "5$ of ~me"}}
    assert read("monitor", "loggers", loggers).monitor.loggers == {
        "/home/mia/a.py:Log": {"folder": "/home/mia/logs", "title": "5$ of ~me"}
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("$NO_SUCH/x", r"run\.folder: the environment variable NO_SUCH in '\$NO_SUCH/x' is not set"),
        ("${NO_SUCH}", r"the environment variable NO_SUCH "),
    ],
)
def test_what_cannot_be_expanded_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read("run", "folder", text)


def test_files_overrides_and_sft_expand_too_and_the_resolved_settings_are_full(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(MINIMAL_SETTINGS))
    settings = load_settings(file, ["run.folder=~/x", "data.train=$DISK/a.jsonl"])
    text = dump_settings(settings)
    assert "/home/mia/x" in text
    assert "/scratch/7/a.jsonl" in text
    kept = {name: MINIMAL_SETTINGS[name] for name in ("run", "model", "optimizer")}
    file.write_text(yaml.safe_dump({**kept, "data": {"train": "~/a.jsonl"}, "sft": {"batch_size": 1, "max_tokens": 9}}))
    assert load_sft_settings(file).data.train["train"].path == "/home/mia/a.jsonl"
