"""Conversions that are killed write the same bytes as undisturbed ones."""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_mp.checkpoint.convert import RECORD
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = pytest.mark.slow
TIMEOUT_S = 300
IMPORTS = "from pathlib import Path; from grpo_mp.checkpoint.convert import to_megatron"


def start(source: Path, destination: Path) -> "subprocess.Popen[bytes]":
    paths = f"Path({str(source)!r}), Path({str(destination)!r})"
    code = f"{IMPORTS}; to_megatron({paths}, lambda written, total: None, part_bytes=100_000)"
    return subprocess.Popen([sys.executable, "-c", code])


def contents(folder: Path) -> dict[str, str]:
    """Checksum by name of file, subfolders included."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_killed_twice(tmp_path: Path) -> None:
    model, final = tmp_path / "model", tmp_path / "final"
    make_tiny(model, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=12)
    assert start(model, tmp_path / "undisturbed").wait(TIMEOUT_S) == 0
    for delay_s in (0.0, 0.1):
        process, record = start(model, final), final.with_name("final.incomplete") / RECORD
        before = record.stat().st_mtime_ns if record.exists() else None
        while process.poll() is None and (not record.exists() or record.stat().st_mtime_ns == before):
            time.sleep(0.001)
        time.sleep(delay_s)
        process.kill()
        process.wait(TIMEOUT_S)
    assert start(model, final).wait(TIMEOUT_S) == 0
    assert contents(final) == contents(tmp_path / "undisturbed")
