"""The memory that a weight sync takes of a rank, of two that exchange shards, beside sync.bucket_bytes."""

import subprocess
import sys

import pytest

from tests.bench.sync_memory import LAYOUTS, PUSHES, RANKS


@pytest.mark.nightly
def test_a_sync_takes_no_more_memory_than_its_setting_allows() -> None:
    """By expert and by tensor parallelism, of each push of all weights."""
    result = subprocess.run([sys.executable, "-m", "tests.bench.sync_memory"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert sum(line.startswith(LAYOUTS) for line in result.stdout.splitlines()) == len(LAYOUTS) * RANKS * PUSHES
