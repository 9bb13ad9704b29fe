"""The command line of `grpo-mp convert`: what it prints, and its exit status."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import run_command

RunTool = Callable[..., tuple[int, str]]


@pytest.fixture
def run_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunTool:
    """Run the tool; returns its exit status and what it printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str]:
        result = run_command(capsys, "convert", *arguments)
        return result.status, result.out + result.err

    return run


def test_round_trip(run_tool: RunTool, model: Path, tmp_path: Path) -> None:
    status, text = run_tool("to-megatron", model, tmp_path / "megatron")
    assert status == 0, text
    assert f"written: {tmp_path / 'megatron'}" in text
    status, text = run_tool("to-hf", tmp_path / "megatron", tmp_path / "back")
    assert status == 0, text
    status, text = run_tool("check", model, tmp_path / "back")
    assert status == 0
    assert re.fullmatch(r"equal bit for bit: \d+ tensors\n", text)


def test_a_step_of_a_run_gets_its_config_from_the_runs_model(run_tool: RunTool, model: Path, tmp_path: Path) -> None:
    """The error names the folder if it is missing."""
    step = tmp_path / "run/checkpoints/step_000001"
    assert run_tool("to-megatron", model, step)[0] == 0
    (step / "conversion.json").unlink()
    status, text = run_tool("to-hf", step, tmp_path / "a")
    assert status == 2
    assert f"{step}: its model is not known: name the model's folder with --like" in text
    (tmp_path / "run/settings.yaml").write_text(json.dumps({"model": {"path": str(model)}}))
    assert run_tool("to-hf", step, tmp_path / "a")[0] == 0
    assert "equal bit for bit" in run_tool("check", model, tmp_path / "a")[1]
    (tmp_path / "run/settings.yaml").write_text(json.dumps({"model": {"path": "gone"}}))
    status, text = run_tool("to-hf", step, tmp_path / "b")
    assert status == 2
    assert "its model gone is not here: name the model's folder with --like" in text


def test_a_user_error_is_one_sentence(run_tool: RunTool, model: Path, tmp_path: Path) -> None:
    status, text = run_tool("to-hf", model, tmp_path / "back", "--like", model)
    assert status == 2
    assert text.splitlines()[-1].startswith(f"error: {model} is neither a run's checkpoint nor a torch_dist checkpoint")
    assert "written" not in text
    assert run_tool("to-megatron", tmp_path / "nowhere", tmp_path / "back")[0] == 2
