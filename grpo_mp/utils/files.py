"""Read and write small files: atomic writes, JSON, checksums, the last lines of a log."""

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

INCOMPLETE = ".incomplete"  # suffix of files and folders that are being written
OF_PROCESS = re.compile(r".+\.[0-9]+\.incomplete")  # names of the temporary files of `incomplete`
# Environment variable of an engine's processes: path of a scratch folder that is removed after they have exited.
ENGINE_SCRATCH = "GRPO_MP_ENGINE_SCRATCH"


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with "?". Output of tools and JSON may contain them."""
    return text.encode("utf-8", "replace").decode()


def as_json(value: Any, ensure_ascii: bool = True) -> str:
    """Serialize a value to JSON on one line. Infinity and NaN become null; values that JSON lacks become text."""
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


def write_atomically(file: Path, text: str, private: bool = False) -> None:
    """Write text to a file in UTF-8 and sync it to disk; on failure the file stays as it was.

    `private`: give read and write permission to this user only.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    opener = open_private if private else None
    with incomplete(file) as temporary, open(temporary, "w", encoding="utf-8", opener=opener) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def open_private(path: str, flags: int) -> int:
    """Open a file as `opener` of `open`; a new file gets mode 600."""
    return os.open(path, flags, mode=0o600)


@contextmanager
def incomplete(file: Path) -> Iterator[Path]:
    """Yield a temporary path beside `file`. Rename it to `file` after the body; remove it if the body fails."""
    # A random number, because processes of two nodes may have the same process id on a shared file system.
    temporary = file.with_name(f"{file.name}.{secrets.randbits(64)}{INCOMPLETE}")
    try:
        yield temporary
        temporary.replace(file)
    except BaseException:  # on a full disk the leftover would keep its space
        temporary.unlink(missing_ok=True)
        raise


def remove_incomplete(folder: Path) -> None:
    """Remove temporary files of `incomplete` that killed processes left below a folder.

    No process may be writing to the folder.
    """
    for file in folder.rglob(f"*{INCOMPLETE}"):
        if OF_PROCESS.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Call fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_lines(log: Path, count: int) -> tuple[str, ...]:
    """Return the last `count` non-blank lines of a log, or an empty tuple if the file is missing."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return tuple([line for line in lines if line.strip()][-count:])


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Return an empty dict if the file is missing or not valid JSON."""
    try:
        values: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return values


def write_json(file: Path, values: Mapping[str, Any], private: bool = False) -> None:
    """Write a JSON object to a file with `write_atomically`."""
    write_atomically(file, json.dumps(values, indent=2), private)


def file_digest(file: Path) -> str:
    """Return the XXH128 checksum of a file as hexadecimal text, equal to the output of `xxh128sum`."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def stat_digest(files: Iterable[Path]) -> str:
    """Return a digest of the names, sizes and modification times of files."""
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return xxhash.xxh3_128_hexdigest(json.dumps(stats).encode())
