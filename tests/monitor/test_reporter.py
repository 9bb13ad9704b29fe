"""The report at the end of a run: a process of its own, whose failure or slowness is one warning."""

from pathlib import Path

import pytest

from grpo_mp.monitor.reporter import write_report
from tests.launch.cluster import wait_until

WAITS = """
import time
from pathlib import Path
while not Path("go").exists():
    time.sleep(0.01)
Path("calls").touch()
"""
FAILS = "raise SystemExit(3)"
STATES = """
import os, sys
from pathlib import Path
Path("calls").write_text("|".join([*sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"]]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "grpo_mp").mkdir()
    (tmp_path / "grpo_mp" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)  # `python -m` finds the package of this folder
    return tmp_path


def test_report_and_timeline_are_written_without_the_devices_of_the_run(run: Path) -> None:
    (run / "grpo_mp" / "__main__.py").write_text(STATES)
    assert write_report(run) is None
    assert (run / "calls").read_text() == f"report|{run}|--trace|"


def test_a_report_that_fails_or_is_slow_is_one_warning(run: Path) -> None:
    (run / "grpo_mp" / "__main__.py").write_text(FAILS)
    assert write_report(run) == f"report: exit status 3, see {run / 'logs' / 'report.log'}"
    (run / "grpo_mp" / "__main__.py").write_text(WAITS)
    assert write_report(run, 0.5) == f"report: still being written, see {run / 'logs' / 'report.log'}"
    (run / "go").touch()
    wait_until((run / "calls").exists, "the end of the report")
    (run / "logs" / "report.log").unlink()
    (run / "logs").rmdir()
    assert write_report(run) == "report: not started: No such file or directory"
