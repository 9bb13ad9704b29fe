"""What `grpo-mp watch` and `grpo-mp report` say of a real run that has ended."""

from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from tests.e2e.conftest import LAST_STEP, FinishedRun


@pytest.fixture(scope="module")
def run(finished_run: FinishedRun) -> Path:
    return finished_run.folder / "run"


def test_the_run_that_has_ended(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert main(["watch", str(run), "--once"]) == 0
    assert f"step {LAST_STEP}/{LAST_STEP}" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert f"{LAST_STEP} of {LAST_STEP} steps" in capsys.readouterr().out
    assert "Engine against policy" in (run / "report.html").read_text()
