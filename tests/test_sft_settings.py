"""Settings of supervised fine-tuning: which file is one, what is refused, and what the run's length follows from."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.config import (
    SftSettings,
    check_sft_settings,
    dump_settings,
    load_any_settings,
    load_settings,
    load_sft_settings,
    training_module,
)
from grpo_mp.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS

MINIMAL: dict[str, Any] = {
    "run": {"folder": "runs/x"},
    "model": {"path": "checkpoints/x"},
    "data": {"train": "chats.jsonl"},
    "sft": {"batch_size": 8, "epochs": 2, "max_tokens": 64},
    "optimizer": {"lr": 1e-5},
}


def settings_of(**sections: Any) -> SftSettings:
    changed = {name: MINIMAL.get(name, {}) | values for name, values in sections.items()}
    return check_sft_settings(MINIMAL | changed, "test")


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"rollout": {"group_size": 8}}, "test: rollout belongs to RL, and supervised fine-tuning has no engines"),
        ({"reward": {}}, "test: reward belongs to RL"),
        ({"sft": {"bach_size": 4}}, "unknown setting sft.bach_size (did you mean sft.batch_size?)"),
        ({"data": {"prompts_column": "x"}}, "unknown setting data.prompts_column (did you mean data.prompt_column?)"),
        ({"modle": {}}, "unknown setting modle (did you mean model?)"),
        ({"sft": {"batch_size": "many"}}, "sft.batch_size: expected an integer, found 'many'"),
        ({"sft": {"loss_on": "user"}}, "sft.loss_on: Input should be 'assistant', 'last' or 'all'"),
        ({"sft": {"epochs": None}}, "nothing says when the run ends: set run.steps or sft.epochs"),
        (
            {"training": {"epochs": 2}},
            "training.epochs=2 belongs to RL: a step of supervised fine-tuning is one update",
        ),
        ({"training": {"router_replay": "R3"}}, "training.router_replay=R3 belongs to RL"),
        ({"optimizer": {"offload": "host"}, "model": {"dtype": "float32"}}, "optimizer.offload=host needs"),
        (
            {"run": {"export_servers": {"urls": ["http://a"]}}},
            "run.export_servers load the folders of run.export_every",
        ),
    ],
)
def test_wrong_settings_are_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        settings_of(**sections)
    assert sentence in str(raised.value)


def test_a_file_is_of_the_kind_that_its_section_sft_says(tmp_path: Path) -> None:
    of_sft, of_rl = tmp_path / "sft.yaml", tmp_path / "rl.yaml"
    of_sft.write_text(yaml.safe_dump(MINIMAL))
    of_rl.write_text(yaml.safe_dump(MINIMAL_SETTINGS))
    assert load_any_settings(of_sft, ["sft.epochs=3"]) == load_sft_settings(of_sft, ["sft.epochs=3"])
    assert load_any_settings(of_rl) == load_settings(of_rl)
    assert [training_module(file) for file in (of_sft, of_rl)] == ["grpo_mp.sft", "grpo_mp.train"]
    with pytest.raises(UserError, match=r"settings of supervised fine-tuning \(section sft\): run `grpo-mp sft`"):
        load_settings(of_sft)
    with pytest.raises(UserError, match="belongs to RL"):
        load_sft_settings(of_rl)


def test_resolved_settings_are_read_back_equal(tmp_path: Path) -> None:
    settings = settings_of(data={"train": {"a": {"path": "a.jsonl", "weight": 2}, "b": "b.parquet"}})
    (tmp_path / "settings.yaml").write_text(dump_settings(settings))
    assert load_sft_settings(tmp_path / "settings.yaml") == settings


@pytest.mark.parametrize(("epochs", "steps", "expected"), [(2, 0, 25), (2, 7, 7), (2, 30, 25), (None, 30, 30)], ids=str)
def test_the_run_ends_with_its_epochs_or_its_steps(epochs: int | None, steps: int, expected: int) -> None:
    """Twice 100 samples, 8 a step: the last step has what is left."""
    settings = settings_of(sft={"epochs": epochs}, run={"steps": steps}).with_steps(100)
    assert settings.run.steps == settings.total_updates == expected
    assert settings.with_steps(100) == settings
