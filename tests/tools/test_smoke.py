"""The smoke test of a cluster, on the ranks that this machine has."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mp import platform
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.engine_memory import EngineMemory
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GIB
from tools.smoke import DECODING, job_settings
from tools.smoke_engine import EngineRates, Workload, check_sleep, decode_gb_s, describe

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
    assert rows == {"machine", "models", "engine", *jobs, "export", "rates"}
    engine = re.search(
        r"decode (\d+) tokens/s, (\S+) of SGLang's own .* ([\d.]+) GiB awake, ([\d.]+) asleep", done.stdout
    )
    assert engine, done.stdout
    rate, ratio, awake, asleep = map(float, engine.groups())
    assert rate > 10
    assert 0.2 < ratio < 5
    assert awake > 0.5
    assert asleep > 0.5
    assert re.search(r"killed after step [1-5]", done.stdout)


def test_a_check_that_fails_says_why_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / DECODING).write_text("0.5")
    done = smoke("--out", str(tmp_path), "--only", "export", "rates")
    assert done.returncode == 1
    assert re.search(r"^export .* FAILED: .*kill/final", done.stdout, re.MULTILINE)
    assert re.search(r"FAILED: export\s*$", done.stdout)
    cluster = read_cluster(str(tmp_path / "cluster.yaml"))
    assert cluster.achievable.device_memory == pytest.approx(0.5 / cluster.device_memory_gb_s, rel=0.06)


RATES = EngineRates(
    tokens_per_s=128_000, benchmark_tokens_per_s=160_000, awake=60 * GIB, asleep=1.5 * GIB, woken=60 * GIB
)


def test_a_sleeping_engine_keeps_at_most_what_plans_count(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = EngineMemory(communication=1.0 * GIB)  # with a context of 0.6 GiB
    kept = replace(RATES, asleep=1.7 * GIB)
    check_sleep(kept, planned)  # a CPU engine keeps its memory
    monkeypatch.setattr(platform, "on_cuda", lambda: True)
    check_sleep(RATES, planned)
    with pytest.raises(UserError, match=r"keeps 1\.70 GiB of its GPU, and plans count 1\.60"):
        check_sleep(kept, planned)


def test_decoding_reads_weights_and_cache_in_the_time_that_launches_leave() -> None:
    """128 sequences at 128,000 tokens/s decode a step in 1 ms, of which 4 layers' launches take 0.24 ms."""
    planned = EngineMemory(weights=1.5e9, bytes_per_token=1e4)
    expected = (1.5e9 + 128 * (64 + 256) * 1e4) / (1e-3 - 4 * 60e-6) / 1e9
    assert decode_gb_s(RATES, Workload(16, 8, 64, 512), planned, 4) == pytest.approx(expected)
    assert decode_gb_s(RATES, Workload(16, 8, 64, 512), planned, 17) is None
    assert "128000 tokens/s, 0.80 of SGLang's own benchmark; 60.00 GiB awake, 1.50 asleep" in describe(RATES)
