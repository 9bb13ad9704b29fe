"""`grpo-mp convert`: what it prints, its exit status, how folders are compared, and conversions that are killed."""

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.compare import compare_weights
from grpo_mp.checkpoint.convert import RECORD
from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.models.fp8 import quantize
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


BASE = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.zeros(2), "nan": torch.tensor([float("nan")])}


def write_folder(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def differences(tmp_path: Path, changes: dict[str, Tensor], tolerance: float = 0.0) -> list[tuple[str, str]]:
    left = write_folder(tmp_path / "one", BASE)
    right = write_folder(tmp_path / "other", BASE | changes)
    result = compare_weights(HfReader(left), HfReader(right), tolerance)
    return [(difference.name, difference.description.replace(str(tmp_path), "")) for difference in result]


def test_the_worst_comes_first(tmp_path: Path) -> None:
    changes = {"a": BASE["a"] + 0.25, "b": BASE["b"].index_fill(0, torch.tensor([2]), 3.0), "d": torch.ones(1)}
    assert differences(tmp_path, changes | {"c": torch.zeros(3)}) == [
        ("c", "shape [2] and [3]"),
        ("d", "only in /other"),
        ("b", "1 of 4 values differ, by 2 at most"),
        ("a", "6 of 6 values differ, by 0.25 at most"),
    ]


@pytest.mark.parametrize(("tolerance", "count"), [(0.0, 1), (1e-9, 0)])
def test_a_negative_zero_is_a_difference_of_bits(tolerance: float, count: int, tmp_path: Path) -> None:
    assert len(differences(tmp_path, {"c": torch.tensor([0.0, -0.0])}, tolerance)) == count


def test_fp8_is_compared_by_its_values(tmp_path: Path) -> None:
    weight, scale = quantize(BASE["a"])
    result = differences(tmp_path, {"a": weight, "a_scale_inv": scale}, tolerance=0.2)
    assert result == [("a", "dtype torch.float32 and torch.float8_e4m3fn"), ("a_scale_inv", "only in /other")]


TIMEOUT_S = 300
IMPORTS = "from pathlib import Path; from grpo_mp.checkpoint.convert import to_megatron"


def start(source: Path, destination: Path) -> "subprocess.Popen[bytes]":
    paths = f"Path({str(source)!r}), Path({str(destination)!r})"
    code = f"{IMPORTS}; to_megatron({paths}, lambda written, total: None, part_bytes=100_000)"
    return subprocess.Popen([sys.executable, "-c", code])


def contents(folder: Path) -> dict[str, str]:
    """Checksum by name of file, subfolders included."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_killed_twice(tmp_path: Path) -> None:
    model = tmp_path / "model"
    final = tmp_path / "final"
    make_tiny(model, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=12)
    assert start(model, tmp_path / "undisturbed").wait(TIMEOUT_S) == 0
    for delay_s in (0.0, 0.1):
        process = start(model, final)
        record = final.with_name("final.incomplete") / RECORD
        before = record.stat().st_mtime_ns if record.exists() else None
        while process.poll() is None and (not record.exists() or record.stat().st_mtime_ns == before):
            time.sleep(0.001)
        time.sleep(delay_s)
        process.kill()
        process.wait(TIMEOUT_S)
    assert start(model, final).wait(TIMEOUT_S) == 0
    assert contents(final) == contents(tmp_path / "undisturbed")
