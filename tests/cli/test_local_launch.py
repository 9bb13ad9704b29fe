"""Ranks of one machine that do not see Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
