"""Dry runs of batch scripts, without Slurm; every settings file has a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in ("tiny_moe", "moe_671b"))) for path in SCRIPTS],
    ids=lambda script: script.stem,
)
def test_dry_run_shows_settings_nodes_environment_and_commands(script: Path) -> None:
    process = dry_run(script, "run.steps=7")
    assert (process.returncode, process.stderr) == (0, "")
    options = dict(re.findall(r" --(nodes|ntasks-per-node)=(\S+)", script.read_text()))
    nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
    assert "steps: 7" in process.stdout
    assert f"{nodes * per_node} ranks; layout: " in process.stdout
    assert f"  node{nodes - 1}: ranks {(nodes - 1) * per_node}-{nodes * per_node - 1}; " in process.stdout
    assert "MASTER_PORT=20000" in process.stdout
    assert all("--cpu-bind=none" in line for line in process.stdout.splitlines() if line.startswith("srun "))
    assert (
        f"-m grpo_mp.cli.slurm_task runs/{script.stem}/attempts/dry.0 configs/{script.stem}.yaml run.steps=7"
        in process.stdout
    )


def test_ranks_of_a_node_get_all_of_its_cores() -> None:
    process = dry_run(ROOT / "launch" / "qwen2_5_7b.sh", SLURM_CPUS_ON_NODE="128")
    *_, check, run = (line for line in process.stdout.splitlines() if line.startswith("srun "))
    assert "--cpus-per-task=16 " in check
    assert "--cpus-per-task=16 " in run


def test_every_settings_file_has_a_script() -> None:
    assert {script.stem for script in SCRIPTS} == {path.stem for path in (*RL, *SFT)}


def test_bad_settings_end_before_anything_starts() -> None:
    script = ROOT / "launch" / "tiny_moe.sh"
    for arguments, sentence in (
        (["layout.tensor=4"], "needs 4 nodes of 1 ranks, the allocation has 2"),
        (["engine.gpus_per_engine=4"], "does not fit the 2 ranks of this job"),
        (["rollout.grup_size=4"], "did you mean rollout.group_size?"),
    ):
        process = dry_run(script, *arguments)
        assert (process.returncode, sentence in process.stderr) == (2, True), process.stderr
    process = subprocess.run(
        ["bash", str(script)], env={**os.environ, "VENV": sys.prefix}, capture_output=True, text=True
    )
    assert (process.returncode, "this is a batch script: sbatch" in process.stderr) == (2, True)
