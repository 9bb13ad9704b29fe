"""The records of a folder in the making and of a whole one: which parts are there, with size and checksum."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

RECORD = "conversion.json"  # the source's fingerprint, and size and checksum of every file of every part
RECORDS = "conversion"  # while the folder is in the making: one such record per part


def is_there(folder: Path, name: str) -> bool:
    """Whether an earlier start wrote the part, as its checksums say."""
    record = read_json(record_of(folder, name))
    return bool(record) and checksums(folder, name) == record


def record_of(folder: Path, name: str) -> Path:
    """Of one part, while the folder is in the making."""
    return folder / RECORDS / f"{name}.json"


def read_json(file: Path) -> dict[str, Any]:
    """Empty where the file is missing or torn."""
    try:
        held: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return held


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Whole and on disk, or not there."""
    temporary = file.with_name(file.name + ".incomplete")
    with temporary.open("w") as stream:
        json.dump(values, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(file)


def checksums(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file of a part, once it is on disk."""
    path = folder / name
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {str(file.relative_to(folder)): _checksum(file) for file in files if file.is_file()}


def _checksum(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())  # what the record names is on disk
        return {"bytes": file.stat().st_size, "xxh3_128": hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()}
