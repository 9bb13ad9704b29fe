"""What `grpo-mp watch` and `grpo-mp report` say of a real run: in its second step, and when it has ended."""

from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from tests.e2e.conftest import LAST_STEP, FinishedRun


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


def test_the_run_that_has_ended(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert main(["watch", str(run), "--once"]) == 0
    assert f"ended  step {LAST_STEP}/{LAST_STEP}" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert f"{LAST_STEP} of {LAST_STEP} steps" in capsys.readouterr().out
    assert "Engine against policy" in (run / "report.html").read_text()
