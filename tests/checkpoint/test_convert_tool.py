"""The command line of `grpo-mp convert`: what it prints, and its exit status."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.cli.command import run_command
from tools.tiny.models import make_tiny, make_tokenizer

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
    """And the error names the folder where that is gone."""
    step = tmp_path / "run/checkpoints/step_000001"
    assert run_tool("to-megatron", model, step)[0] == 0
    (step / "config.json").unlink()
    status, text = run_tool("to-hf", step, tmp_path / "a")
    assert status == 2
    assert f"{step} has no config.json: name the model's folder with --like" in text
    (tmp_path / "run/settings.yaml").write_text(json.dumps({"model": {"path": str(model)}}))
    assert run_tool("to-hf", step, tmp_path / "a")[0] == 0
    assert "equal bit for bit" in run_tool("check", model, tmp_path / "a")[1]
    (tmp_path / "run/settings.yaml").write_text(json.dumps({"model": {"path": "gone"}}))
    status, text = run_tool("to-hf", step, tmp_path / "b")
    assert status == 2
    assert "settings.yaml, gone, is not here: name the model's folder with --like" in text


def test_a_user_error_is_one_sentence(run_tool: RunTool, model: Path, tmp_path: Path) -> None:
    status, text = run_tool("to-hf", model, tmp_path / "back")
    assert status == 2
    assert text.splitlines()[-1].startswith(f"error: {model} is not a torch_dist checkpoint")
    assert "written" not in text
    assert run_tool("to-megatron", tmp_path / "nowhere", tmp_path / "back")[0] == 2


def test_logits_of_a_folder_and_its_conversion(run_tool: RunTool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny(model, "kimi_k2", make_tokenizer(["apples"]), num_hidden_layers=2, initializer_range=0.1)
    assert run_tool("to-megatron", model, tmp_path / "megatron")[0] == 0
    assert run_tool("check", model, tmp_path / "megatron")[0] == 0
    status, text = run_tool("check", model, tmp_path / "megatron", "--logits")
    assert status == 0, text
    assert re.search(r"logits differ by \d\.\d\de-0[6-9] of the largest", text)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1.001}, model / "model.safetensors")
    assert run_tool("check", model, tmp_path / "megatron", "--logits")[0] == 1
    assert run_tool("check", model, tmp_path / "megatron", "--logits", "--tolerance", "0.01")[0] == 0


def test_a_model_larger_than_memory_is_not_run(run_tool: RunTool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    status, text = run_tool("check", model, model, "--logits")
    assert status == 2
    assert f"{model}: running it takes 1 GiB in float32 and 0 GiB are free" in text
