"""Temporary folders are gone with their process, or with a later one where it was killed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from grpo_mp.utils import scratch
from grpo_mp.utils.scratch import ScratchFolder, remove_abandoned

HOLD = (
    "import sys; from grpo_mp.utils.scratch import ScratchFolder; print(ScratchFolder('job').path, flush=True); input()"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_with_what_is_in_it(temporary: Path) -> None:
    with ScratchFolder("engine") as folder:
        assert folder.parent == temporary
        (folder / "file").touch()
    assert not folder.exists()
    made = ScratchFolder("engine")
    made.remove()
    made.remove()
    assert list(temporary.iterdir()) == []


def test_a_folder_of_a_killed_process_is_removed_once_it_is_old(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of processes that live stay, and what has other names, or is a link."""
    other = temporary / "grpo_mp_of_someone"
    other.mkdir()
    (temporary / f"{scratch.PREFIX}link").symlink_to(other)
    with ScratchFolder("code") as own:
        environment = os.environ | {"TMPDIR": str(temporary)}
        command = [sys.executable, "-c", HOLD]
        with subprocess.Popen(command, env=environment, text=True, stdin=-1, stdout=-1) as process:
            assert process.stdout
            folder = Path(process.stdout.readline().rstrip())
            assert folder.parent == temporary
            monkeypatch.setattr(scratch, "YOUNG_S", -1.0)
            remove_abandoned()
            assert folder.is_dir()
            process.kill()
        monkeypatch.setattr(scratch, "YOUNG_S", 3600.0)
        remove_abandoned()
        assert folder.is_dir()
        monkeypatch.setattr(scratch, "YOUNG_S", -1.0)
        remove_abandoned()
        assert not folder.exists()
        assert own.is_dir()
    assert sorted(path.name for path in temporary.iterdir()) == [f"{scratch.PREFIX}link", other.name]
