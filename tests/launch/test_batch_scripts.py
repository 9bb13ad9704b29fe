"""Dry runs of batch scripts, without Slurm; every settings file has a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mp.cli import slurm_job
from grpo_mp.utils.errors import UserError
from tests.recipes import RL, SFT

ROOT = Path(__file__).parents[2]
BATCH_SCRIPTS = {path for path in (ROOT / "launch").glob("*.sh") if "\n#SBATCH" in path.read_text()}
SCRIPTS = sorted(BATCH_SCRIPTS - {ROOT / "launch" / name for name in ("slurm.sh", "smoke.sh")})


def dry_run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment_without_slurm = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(
        ["bash", str(script), "--dry-run", *arguments],
        env={**environment_without_slurm, "VENV": sys.prefix, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def check_shown(script: Path, shown: str) -> None:
    """Settings, nodes, environment and commands of a dry run with `run.steps=7`."""
    options = dict(re.findall(r" --(nodes|ntasks-per-node)=(\S+)", script.read_text()))
    nodes = int(options["nodes"])
    per_node = int(options["ntasks-per-node"])
    assert "steps: 7" in shown
    assert f"{nodes * per_node} ranks; layout: " in shown
    assert f"  node{nodes - 1}: ranks {(nodes - 1) * per_node}-{nodes * per_node - 1}; " in shown
    assert "MASTER_PORT=20000" in shown
    assert all("--cpu-bind=none" in line for line in shown.splitlines() if line.startswith("srun "))
    assert (
        f"-m grpo_mp.cli.slurm_task runs/{script.stem}/attempts/dry.0 configs/{script.stem}.yaml run.steps=7" in shown
    )


def test_dry_run_shows_settings_nodes_environment_and_commands() -> None:
    """Ranks of a node get all of its cores."""
    script = ROOT / "launch" / "moe_671b.sh"
    process = dry_run(script, "run.steps=7", SLURM_CPUS_ON_NODE="128")
    assert (process.returncode, process.stderr) == (0, "")
    check_shown(script, process.stdout)
    *_, check, run = (line for line in process.stdout.splitlines() if line.startswith("srun "))
    assert "--cpus-per-task=16 " in check
    assert "--cpus-per-task=16 " in run


# Notes what slurm_job is asked; each start of it would import torch.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "${@:3}" >"$(dirname "$0")/$3"
if [ "$3" = folder ]; then echo "runs/$(basename "$4" .yaml)"; fi
"""


@pytest.fixture
def noting_venv(tmp_path: Path) -> Path:
    """Its Python notes what it is asked."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def ask_here(script: Path, venv: Path, *arguments: str) -> str:
    """The questions of a dry run, answered in this process; returns what the script itself shows."""
    process = dry_run(script, *arguments, VENV=str(venv))
    assert (process.returncode, process.stderr) == (0, "")
    for question in ("folder", "show"):
        asked = (venv / "bin" / question).read_text().splitlines()
        assert slurm_job.run_command(slurm_job._parser().parse_args(asked)) == 0
    return process.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_every_script_asks_and_shows(script: Path, noting_venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = ask_here(script, noting_venv, "run.steps=7")
    folder, shown = capsys.readouterr().out.split("\n", 1)
    assert folder == f"runs/{script.stem}"
    check_shown(script, shown + commands)


def test_every_settings_file_has_a_script() -> None:
    assert {script.stem for script in SCRIPTS} == {path.stem for path in (*RL, *SFT)}


def test_bad_settings_end_before_anything_starts(noting_venv: Path) -> None:
    script = ROOT / "launch" / "tiny_moe.sh"
    with pytest.raises(UserError, match="needs 4 nodes of 1 ranks, the allocation has 2"):
        ask_here(script, noting_venv, "layout.tensor=4")
    for setting, sentence in (
        ("engine.gpus_per_engine=4", "does not fit the 2 ranks of this job"),
        ("rollout.grup_size=4", "did you mean rollout.group_size?"),
    ):
        process = dry_run(script, setting)
        assert (process.returncode, sentence in process.stderr) == (2, True), process.stderr
    process = subprocess.run(
        ["bash", str(script)], env={**os.environ, "VENV": str(noting_venv)}, capture_output=True, text=True
    )
    assert (process.returncode, "this is a batch script: sbatch" in process.stderr) == (2, True)
