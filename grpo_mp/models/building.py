"""A folder in the making: part by part, with checksums, so that a second start goes on where the first stopped.

It stands beside its final name as NAME.incomplete and is renamed when it is whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.errors import UserError

RECORD = "conversion.json"  # the source's fingerprint, and size and checksum of every file of every part
Watch = Callable[[int, int], None]  # bytes just written, bytes to write in all by this start


@dataclass(frozen=True)
class Part:
    """What is written at once: `bytes` of the parameters in `params`, as the file or folder `name`."""

    name: str
    params: tuple[str, ...]
    bytes: int


def divide(sizes: Mapping[str, int], limit: int) -> list[tuple[tuple[str, ...], int]]:
    """Names and their bytes -> runs of names, in order, of at most `limit` bytes or one name, with their bytes."""
    runs: list[tuple[list[str], int]] = []
    for name, size in sizes.items():
        if not runs or runs[-1][1] + size > limit:
            runs.append(([], 0))
        names, held = runs[-1]
        runs[-1] = ([*names, name], held + size)
    return [(tuple(names), held) for names, held in runs]


def fingerprint(files: Iterable[Path], *what: object) -> str:
    """Of files by name, size and time of change, and of what is made of them."""
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(json.dumps([stats, [str(each) for each in what]]).encode()).hexdigest()


def build(
    final: Path,
    source: str,
    parts: Sequence[Part],
    write: Callable[[Path, Part], None],
    finish: Callable[[Path], None],
    watch: Watch,
) -> None:
    """Write the parts that are not there yet, then `finish`, then rename; nothing where `final` is whole already.

    `write` and `finish` get the incomplete folder. Raises UserError where `final` or its beginning are of another
    source, and where the disk is too small.
    """
    if final.exists():
        _check_same(final, source, "holds something else: choose another destination, or remove it")
        return
    folder = final.with_name(final.name + ".incomplete")
    done = _done(folder, source)
    missing = [part for part in parts if part.name not in done]
    total = sum(part.bytes for part in missing)
    _check_disk(folder, total)
    folder.mkdir(parents=True, exist_ok=True)
    _record(folder, source, done)
    for part in missing:
        _remove(folder / part.name)
        write(folder, part)
        done[part.name] = _checksums(folder, part.name)
        _record(folder, source, done)
        watch(part.bytes, total)
    finish(folder)
    folder.rename(final)


def _done(folder: Path, source: str) -> dict[str, Any]:
    """Parts that an earlier start wrote, as their checksums say."""
    if not folder.exists():
        return {}
    _check_same(folder, source, "holds the beginning of another conversion: remove it")
    parts = _read_record(folder)["parts"]
    return {name: files for name, files in parts.items() if _checksums(folder, name) == files}


def _check_same(folder: Path, source: str, otherwise: str) -> None:
    if _read_record(folder).get("source") != source:
        raise UserError(f"{folder} {otherwise}")


def _check_disk(folder: Path, needed: int) -> None:
    existing = next(path for path in folder.absolute().parents if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(f"{existing}: the disk has {free:,} bytes free and {needed:,} are needed: make room first")


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record


def _record(folder: Path, source: str, parts: Mapping[str, Any]) -> None:
    temporary = folder / (RECORD + ".incomplete")
    with temporary.open("w") as file:
        json.dump({"source": source, "parts": parts}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / RECORD)


def _checksums(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    path = folder / name
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {str(file.relative_to(folder)): _checksum(file) for file in files if file.is_file()}


def _checksum(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())  # what the record names is on disk
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
