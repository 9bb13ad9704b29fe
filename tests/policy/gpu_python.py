"""Where the Python code of libraries lies that a machine without CUDA cannot install as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def transformer_engine() -> Path:
    """The folder of TransformerEngine's Python wheel: in the environment that the tests run in, but not in its path.

    Where it could be imported, Megatron would take it for usable.
    """
    folder = Path(os.environ.get("REHEARSAL") or Path(sys.prefix) / "rehearsal")
    assert (folder / "transformer_engine").is_dir(), f"{folder}: no transformer_engine: bash launch/install.sh --test"
    return folder


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object that a program printed last. Fails with what it said otherwise."""
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
