"""Write files atomically, append where the disk may be full, and read the last lines of a log."""

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

INCOMPLETE = ".incomplete"  # ends the names of files and folders that are being written
OF_PROCESS = re.compile(r".+\.[0-9]+\.incomplete")  # a file of `incomplete`
ENGINE_SCRATCH = "GRPO_MP_ENGINE_SCRATCH"  # variable of an engine's processes: a folder removed when they have ended


def encodable(text: str) -> str:
    """Return a text with "?" for each lone surrogate, which a tool, an error or JSON may hold and UTF-8 lacks."""
    return text.encode("utf-8", "replace").decode()


def as_json(value: Any, ensure_ascii: bool = True) -> str:
    """Return JSON on one line. Of what users' functions give and JSON lacks, objects and keys are written as text.

    Numbers that are not finite become null: no reader of JSON takes them.
    """
    return json.dumps(_as_known(value), ensure_ascii=ensure_ascii, default=str, allow_nan=False)


def _as_known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_as_key(key): _as_known(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_as_known(item) for item in value] if isinstance(value, list | tuple) else value


def _as_key(key: Any) -> Any:
    is_known = isinstance(key, str | int | None) or (isinstance(key, float) and math.isfinite(key))
    return key if is_known else str(key)


def write_atomically(file: Path, text: str, make_folder: bool = True, private: bool = False) -> None:
    """Write a file in UTF-8 that is complete and on disk, or as it was before.

    Makes its folder; with `make_folder` false raises FileNotFoundError where it is missing, as where it was removed.
    `private`: for this user alone.
    """
    if make_folder:
        file.parent.mkdir(parents=True, exist_ok=True)
    opener = open_private if private else None
    with incomplete(file) as temporary, open(temporary, "w", encoding="utf-8", opener=opener) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def open_private(path: str, flags: int) -> int:
    """Open a file, for `open`, that this user alone may read where it is made."""
    return os.open(path, flags, mode=0o600)


@contextmanager
def incomplete(file: Path) -> Iterator[Path]:
    """Yield a file beside `file` that takes its name when the body has written it; it is removed where that fails."""
    # A random number: on a shared file system, processes of two nodes may have the same one.
    temporary = file.with_name(f"{file.name}.{secrets.randbits(64)}{INCOMPLETE}")
    try:
        yield temporary
        temporary.replace(file)
    except BaseException:  # on a full disk its bytes would be missing
        temporary.unlink(missing_ok=True)
        raise


def remove_incomplete(folder: Path) -> None:
    """Remove what `incomplete` of processes that were killed has left below a folder; none may write there now."""
    for file in folder.rglob(f"*{INCOMPLETE}"):
        if OF_PROCESS.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


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


def write_json(file: Path, values: Mapping[str, Any], make_folder: bool = True, private: bool = False) -> None:
    """Write a file as `write_atomically` does: it is complete and on disk, or absent."""
    write_atomically(file, json.dumps(values, indent=2), make_folder, private)


def file_digest(file: Path) -> str:
    """Return the checksum of a file, as `xxh128sum` writes it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
