"""Settings of supervised fine-tuning: which file is one, what is refused, and what the run's length follows from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from grpo_mp.config import (
    SftSettings,
    check_sft_settings,
    load_any_settings,
    load_settings,
    load_sft_settings,
    training_module,
)
from grpo_mp.data.chat_data import ChatSet
from grpo_mp.data.cursor import Cursor
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer import sft_step
from grpo_mp.trainer.sft_step import next_batch
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS

MINIMAL: dict[str, Any] = {
    "run": {"folder": "runs/x", "epochs": 2},
    "model": {"path": "checkpoints/x"},
    "data": {"train": "chats.jsonl"},
    "sft": {"batch_size": 8, "max_tokens": 64},
    "optimizer": {"lr": 1e-5},
}


def settings_of(**sections: Any) -> SftSettings:
    changed = {name: MINIMAL.get(name, {}) | values for name, values in sections.items()}
    return check_sft_settings(MINIMAL | changed, "test")


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"rollout": {"group_size": 8}}, "test: rollout belongs to RL, and supervised fine-tuning has no engines"),
        ({"data": {"prompts_column": "x"}}, "unknown setting data.prompts_column (did you mean data.prompt_column?)"),
        ({"run": {"epochs": None}}, "run.steps is missing: set it, or run.epochs"),
        (
            {"training": {"epochs": 2}},
            "training.epochs=2 belongs to RL: a step of supervised fine-tuning is one update",
        ),
        ({"optimizer": {"offload": "host"}, "model": {"dtype": "float32"}}, "optimizer.offload=host needs"),
    ],
)
def test_wrong_settings_are_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        settings_of(**sections)
    assert sentence in str(raised.value)


def test_a_file_is_of_the_kind_that_its_section_sft_says(tmp_path: Path) -> None:
    of_sft = tmp_path / "sft.yaml"
    of_rl = tmp_path / "rl.yaml"
    of_sft.write_text(yaml.safe_dump(MINIMAL))
    of_rl.write_text(yaml.safe_dump(MINIMAL_SETTINGS))
    assert load_any_settings(of_sft, ["run.epochs=3"]) == load_sft_settings(of_sft, ["run.epochs=3"])
    assert load_any_settings(of_rl) == load_settings(of_rl)
    assert [training_module(file) for file in (of_sft, of_rl)] == ["grpo_mp.sft", "grpo_mp.train"]
    with pytest.raises(UserError, match=r"settings of supervised fine-tuning \(section sft\): run `grpo-mp sft`"):
        load_settings(of_sft)
    with pytest.raises(UserError, match="belongs to RL"):
        load_sft_settings(of_rl)


@pytest.mark.parametrize(("epochs", "steps", "expected"), [(2, 0, 25), (2, 7, 7), (2, 30, 25), (None, 30, 30)], ids=str)
def test_the_run_ends_with_its_epochs_or_its_steps(epochs: int | None, steps: int, expected: int) -> None:
    """Twice 100 samples, 8 a step: the last step has what is left."""
    settings = settings_of(run={"epochs": epochs, "steps": steps}).with_steps(100)
    assert settings.run.steps == settings.total_updates == expected
    assert settings.with_steps(100) == settings


@pytest.mark.parametrize(
    ("epochs", "limit", "done", "seen", "expected"),
    [
        (1, 0, 0, 0, 3),
        (2, 0, 0, 0, 5),
        (2, 0, 3, 10, 6),  # the last step of the first epoch had two samples
        (2, 0, 3, 12, 5),  # killed amid two epochs: all of its steps were full
        (1, 0, 6, 20, 6),  # fewer than were seen
        (2, 4, 3, 10, 4),
    ],
)
def test_a_resumed_run_has_the_steps_of_what_is_left(
    epochs: int, limit: int, done: int, seen: int, expected: int
) -> None:
    """Of 10 samples, 4 a step."""
    settings = settings_of(sft={"batch_size": 4}, run={"epochs": epochs, "steps": limit})
    assert settings.with_steps(10, done, seen).run.steps == expected


def test_every_sample_is_seen_once_in_each_epoch_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 samples, 4 a step: an epoch, then two more."""
    monkeypatch.setattr(sft_step, "pack_samples", lambda *_: None)
    train = cast(ChatSet, SimpleNamespace(epoch_size=10, mixture=()))
    cursor = Cursor(seed=5)
    step = 0
    seen = list[int]()
    for epochs, steps in ((1, 3), (2, 6), (3, 9)):
        settings = settings_of(sft={"batch_size": 4}, run={"epochs": epochs}).with_steps(10, step, len(seen))
        assert settings.run.steps == steps
        while step < settings.run.steps:
            batch = next_batch(train, cursor, settings.step_samples(10, len(seen)), True, 8, cast(Policy, None))
            cursor = batch.cursor
            step = step + 1
            seen += batch.indices
        assert [sorted(seen[start : start + 10]) for start in range(0, len(seen), 10)] == [list(range(10))] * epochs
