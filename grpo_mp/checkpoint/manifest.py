"""The records of a folder in the making and of a whole one: which parts are there, with size and checksum."""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from grpo_mp.errors import UserError

RECORD = "conversion.json"  # the source's fingerprint, and size and checksum of every file of every part
JOINT = "joint"  # in the record: files that are of no one part
RECORDS = "conversion"  # while the folder is in the making: one such record per part
HASH = "xxh3_128"
Files = Mapping[str, Mapping[str, Any]]  # path below the folder -> {"bytes": size, "xxh3_128": digest}


class Checksums:
    """Checks a folder's files against the recorded sizes and checksums, each once. Threads may share it."""

    def __init__(self, folder: Path, files: Files, or_else: str = "") -> None:
        """`or_else`: what a user can do but copy the file again, to stand after those words."""
        self._folder, self._files, self._or_else = folder, files, or_else
        self._checked: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def of_conversion(cls, folder: Path) -> "Checksums":
        """Of what a conversion wrote; knows no file where the folder is none. Raises UserError for a torn record."""
        return cls(folder, _conversion_files(folder))

    @property
    def summary(self) -> str:
        """For people, once all were checked."""
        return f"{len(self._files)} files agree" if self._files else "none are recorded"

    def check(self, file: Path) -> None:
        """Raises UserError where a recorded file is missing, cut short or changed; others count as right."""
        name = str(file.relative_to(self._folder))
        with self._lock:
            if name in self._files and name not in self._checked:
                self._check(file, self._files[name])
                self._checked.add(name)

    def check_share(self, rank: int = 0, size: int = 1) -> None:
        """`check` one of `size` shares of the files, largest first in turn; every rank must take one."""
        by_size = sorted(self._files, key=lambda name: (-int(self._files[name]["bytes"]), name))
        for name in by_size[rank::size]:
            self.check(self._folder / name)

    def _check(self, file: Path, wanted: Mapping[str, Any]) -> None:
        if not file.is_file() or file.stat().st_size != wanted["bytes"]:
            raise UserError(f"{file} is missing or cut short: copy it again{self._or_else}")
        if _digest(file) != wanted[HASH]:
            raise UserError(f"{file} differs from its checksum: copy it again{self._or_else}")


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
    return checksums_of(folder, sorted(path.rglob("*")) if path.is_dir() else [path])


def checksums_of(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The same of files below the folder; their bytes are streamed."""
    return {str(file.relative_to(folder)): _checksum(file) for file in files if file.is_file()}


def _conversion_files(folder: Path) -> dict[str, dict[str, Any]]:
    if not (folder / RECORD).is_file():
        return {}
    try:
        record = json.loads((folder / RECORD).read_text())
        parts = [*record["parts"].values(), record.get(JOINT, {})]
        found = {name: dict(one) for part in parts for name, one in part.items()}
        if all(isinstance(one["bytes"], int) and isinstance(one[HASH], str) for one in found.values()):
            return found
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{folder / RECORD} is torn: copy it again")


def _checksum(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())  # what the record names is on disk
    return {"bytes": file.stat().st_size, HASH: _digest(file)}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
