"""What real engines hold after a sync of all weights, of what changed, and after they load the exported folder."""

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import StartJob, outcome

pytestmark = pytest.mark.slow

JOB = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.e2e.sync_and_export")


def test_an_engine_has_what_it_would_load_from_the_exported_folder(start_job: StartJob, tmp_path: Path) -> None:
    """Bit for bit and in every logprob, and also where only what changed was sent."""
    run = tmp_path / "run"
    result = outcome(start_job(f"run.folder={run}", command=JOB))
    assert (result.status, result.left) == (0, []), result.err
    for engine in (json.loads((run / f"engine_{rank}.json").read_text()) for rank in range(2)):
        first, unchanged, changed, complete, fresh = (
            engine[name] for name in ("first", "unchanged", "changed", "all", "fresh load")
        )
        assert (unchanged["staged"], unchanged["rounds"]) == (0, 0)
        assert unchanged["checksums"] == first["checksums"]
        assert 0 < changed["staged"] < complete["staged"] / 4
        assert changed["checksums"] != first["checksums"]
        assert changed["checksums"] == complete["checksums"] == fresh["checksums"]
        assert changed["scores"] == complete["scores"] == fresh["scores"] != first["scores"]
