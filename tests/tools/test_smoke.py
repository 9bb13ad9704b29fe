"""The smoke test of a cluster, on the ranks that this machine has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mp import platform
from grpo_mp.planner.clusters import read_cluster
from tools.smoke import job_settings

SMOKE = (sys.executable, "-m", "tools.smoke", "--ranks", "2")


def smoke(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*SMOKE, *arguments], capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.slow
def test_a_run_trains_and_its_machine_is_measured(tmp_path: Path) -> None:
    done = smoke("--out", str(tmp_path), "--only", "models", "colocated", "rates")
    assert done.returncode == 0, done.stdout
    assert re.search(r"PASSED\s*$", done.stdout)
    assert re.search(r"^colocated .* sync check .* of .* nats, .* tokens/s", done.stdout, re.MULTILINE)
    cluster = read_cluster(str(tmp_path / "cluster.yaml"))
    assert 0.001 < cluster.bf16_tflops < 10
    assert 0.01 < cluster.disk_gb_s < 100


def test_fp8_weights_are_sent_by_ipc_and_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "compute_capability", lambda: 9.0)
    assert {name for name in job_settings(8) if name.endswith("fp8")} == {"deepseek_fp8", "one_step_off_fp8"}
    assert [name for name in job_settings(1) if name.endswith("fp8")] == ["deepseek_fp8"]


@pytest.mark.nightly
def test_every_check_passes(tmp_path: Path) -> None:
    done = smoke("--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    rows = set(re.findall(r"^(\w+) +\d+ s  ", done.stdout, re.MULTILINE))
    jobs = {"colocated", "deepseek", "one_step_off", "async", "kill"}
    assert rows == {"machine", "models", *jobs, "export", "rates"}
    assert re.search(r"killed after step [1-5]", done.stdout)


def test_a_check_that_fails_says_why_and_the_others_run(tmp_path: Path) -> None:
    done = smoke("--out", str(tmp_path), "--only", "export", "rates")
    assert done.returncode == 1
    assert re.search(r"^export .* FAILED: .*kill/final", done.stdout, re.MULTILINE)
    assert re.search(r"FAILED: export\s*$", done.stdout)
    assert (tmp_path / "cluster.yaml").is_file()
