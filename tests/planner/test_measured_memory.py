"""Planned memory beside the peaks of a process that trains, syncs, saves, exports and resumes."""

import subprocess
import sys

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [(), ("--critic",)])
def test_every_phase_takes_what_is_planned(arguments: tuple[str, ...]) -> None:
    """From 0.95 to 1.02 of it; a save holds a piece beside the state, a load in another layout, too."""
    command = [sys.executable, "-m", "tests.bench.plan_measured", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("ratio") == 8
