"""`grpo-mp launch` submits a batch script; ranks of one machine do not see Ctrl-C."""

import os
import shlex
import signal
import subprocess
import sys
import time
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


LAUNCHER = """
import sys
from grpo_mp.cli import local_launch
local_launch.INTERRUPT_LIMIT_S = 1
sys.exit(local_launch.start_ranks(2, [], "deaf_rank"))
"""
# Rank 0 is deaf, as one that waits in C++; rank 1 ends as an interrupted rank does.
RANK = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
if rank == "0":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    pathlib.Path("started_" + rank).touch()
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_rank_that_does_not_see_ctrl_c_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deaf_rank.py").write_text(RANK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    command = [sys.executable, "-c", LAUNCHER]
    launcher = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / f"started_{rank}").exists() for rank in (0, 1)):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    _, message = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGINT
    assert message == "stopped by Ctrl-C; ranks that had not ended within 1 s were killed\n"
