"""`grpo-mp launch` submits a batch script."""

import os
import shlex
from pathlib import Path

import pytest

from tests.cli.command import run_command

ROOT = Path(__file__).parents[2]
SBATCH = """#!/usr/bin/env bash
printf '%s\\n' "$VENV" "$@" >"$NOTES"
exit 7
"""


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the environment and the arguments that an sbatch of our own was given; it ends with status 7."""
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("VENV", "envs/mine")
    monkeypatch.chdir(ROOT)
    return tmp_path / "notes"


def test_recipe_is_submitted_by_its_script(submitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--partition=gpu", "--comment=second try"]
    command = ["launch", "configs/moe_671b.yaml", *options, "run.steps=7", "--nodes", "32"]
    assert run_command(capsys, *command).status == 7
    expected = ["envs/mine", "--nodes=32", *options, "launch/moe_671b.sh", "run.steps=7"]
    assert submitted.read_text().splitlines() == expected


def test_another_settings_file_is_submitted_by_the_general_script(
    submitted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "moe_671b.yaml"  # the name of a recipe, but not the recipe
    config.write_text((ROOT / "configs" / "moe_671b.yaml").read_text())
    command = ["launch", str(config), "--nodes=32", "run.steps=7"]
    assert run_command(capfd, *command).status == 7
    sbatch = ["--nodes=32", "launch/slurm.sh", str(config), "run.steps=7"]
    assert submitted.read_text().splitlines()[1:] == sbatch
    submitted.unlink()


def test_dry_run_shows_the_job_and_submits_nothing(
    submitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VENV")  # the environment that this command runs in
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = tmp_path / "mine.yaml"
    config.write_text((ROOT / "configs" / "qwen3_30b_a3b.yaml").read_text())
    result = run_command(capfd, "launch", config, "--nodes=2", "--dry-run", "run.steps=7")
    assert (result.status, result.err) == (0, "")
    first, *rest = result.out.splitlines()
    assert shlex.split(first) == ["sbatch", "--nodes=2", "launch/slurm.sh", str(config), "run.steps=7"]
    assert any(line.startswith("16 ranks; layout: ") for line in rest)
    assert f"{config} run.steps=7" in rest[-1]
    assert not submitted.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["configs/tiny_moe.yaml", "run.stps=7"], "unknown setting run.stps (did you mean run.steps?)"),
        (["configs/tiny_moe.yaml", "--partition", "gpu"], "gpu"),
    ],
)
def test_mistakes_are_said_before_anything_is_submitted(
    arguments: list[str], sentence: str, submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, "launch", *arguments)
    assert (result.status, sentence in result.err, result.err.count("\n")) == (2, True, 1)
    assert not submitted.exists()


def test_launch_outside_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_command(capsys, "launch", ROOT / "configs" / "tiny_moe.yaml")
    assert (result.status, "launch/common.sh: no such file: jobs start by the repository" in result.err) == (2, True)


def test_launch_without_slurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", "")
    result = run_command(capsys, "launch", "configs/tiny_moe.yaml")
    assert (result.status, result.err.startswith("error: sbatch is not on this machine")) == (2, True)
