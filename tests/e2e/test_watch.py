"""What `grpo-mp watch` and `grpo-mp doctor run` say of a real run: in its second step, and when it has ended."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor.run_findings import check_live
from grpo_mp.utils.findings import Level
from tests.e2e.conftest import LAST_STEP, FinishedRun
from tests.e2e.jobs import read_jsonl


@pytest.fixture(scope="module")
def run(finished_run: FinishedRun) -> Path:
    return finished_run.folder / "run"


def test_a_run_in_its_second_step(finished_run: FinishedRun) -> None:
    state = finished_run.watched
    assert (state.status, state.step, state.steps) == ("runs", 1, LAST_STEP - 1)
    assert [phase.rank for phase in state.ranks] == [0, 1]
    assert {"GENERATE"} == {phase.name.partition(" ")[0] for phase in state.ranks}
    assert state.sample_step == 1
    assert {number: any(load.works for load in loads) for number, loads in state.engines.items()} == {0: True, 1: True}


def test_its_engines_hold_the_weights_of_one_update(finished_run: FinishedRun, run: Path) -> None:
    """Those of the first step's last one, by what the engines themselves say."""
    first, second = finished_run.engines
    assert (first.index, second.index) == (0, 1)
    assert first.failure == second.failure == ""
    assert first.checksums
    assert first.checksums == second.checksums
    versions = [line["sync/weight_version"] for line in read_jsonl(run / "metrics.jsonl")]
    assert first.version == second.version == f"{versions[1]:g}"
    (finding,) = check_live(finished_run.engines)
    assert finding.level is Level.OK


def test_the_run_that_has_ended(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(
        "grpo_mp.monitor.run_findings.MIN_BUSY_POLLS", 1
    )  # four steps are too short for more on a fast machine
    assert main(["watch", str(run), "--once"]) == 0
    assert f"ended  step {LAST_STEP}/{LAST_STEP}" in capsys.readouterr().out
    assert main(["doctor", "run", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"ok: after each of {LAST_STEP + 1} weight syncs the engines computed the policy's logprobs" in said
    assert re.search(rf"ok: a step takes \d+\.\d\d s, mean of the last {LAST_STEP}", said)
    assert re.search(r"train +rank [01] works \d+\.\d\d s", said)
    assert re.search(r"ok: engine [01] is the slowest of 2", said)


@pytest.mark.slow
def test_its_report_is_served_to_who_has_the_key(run: Path) -> None:
    command = [sys.executable, "-m", "grpo_mp", "watch", str(run), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.get(url.partition("?")[0], trust_env=False).status_code == 401
        page = httpx.get(url, trust_env=False)
        assert page.status_code == 200
        assert "Engine against policy" in page.text
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.communicate()
