"""Write files atomically, and read the last lines of a log."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENGINE_SCRATCH = "GRPO_MP_ENGINE_SCRATCH"  # variable of an engine's processes: a folder removed when they have ended


def write_atomically(file: Path, text: str) -> None:
    """Write a file in UTF-8 that is complete and on disk, or as it was before; makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.incomplete")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def sync_to_disk(path: Path) -> None:
    """Return once a file's content, or a folder's list of files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_lines(log: Path, count: int) -> tuple[str, ...]:
    """Return the last `count` lines of a log that are not blank; none where it is missing."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return tuple([line for line in lines if line.strip()][-count:])


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one where the file is missing or torn."""
    try:
        values: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return values


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a file atomically: it is complete and on disk, or absent."""
    write_atomically(file, json.dumps(values, indent=2))
