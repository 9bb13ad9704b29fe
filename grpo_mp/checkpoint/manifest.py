"""Records of a converted folder, complete or not: its files with size and checksum, and comparing them."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.files import file_digest, sync_to_disk
from grpo_mp.utils.reading import check_path, read_json

CONVERSION_RECORD = "conversion.json"  # the source's fingerprint, and size and checksum of every file of every part
SOURCE_FOLDER = "source_folder"  # key of the record: path of a Hugging Face folder that was converted
SHARED_FILES = "joint"  # key of the record: files that belong to no single part
HASH = "xxh3_128"
Files = Mapping[str, Mapping[str, Any]]  # path below the folder -> {"bytes": size, "xxh3_128": digest}


@contextmanager
def unreadable_is_damaged(file: Path, hint: str = "") -> Iterator[None]:
    """Turn what the system says of a file, as of a broken disk or a permission, into the UserError of a damaged one."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"{file} cannot be read ({reason}): copy it again{hint}") from error


class Checksums:
    """Compares a folder's files with the recorded sizes and checksums, each once. Threads may share it."""

    def __init__(self, folder: Path, files: Files, hint: str = "") -> None:
        """Take checksums by file; `hint` ends the error message: what a user can do instead of copying a file again."""
        self._folder, self._files, self._hint = folder, files, hint
        self._checked: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def of_conversion(cls, folder: Path) -> "Checksums":
        """Read a conversion's record; empty where there is no record. Raises UserError for a damaged one."""
        if not check_path(folder / CONVERSION_RECORD).is_file():
            return cls(folder, {})
        try:
            record = read_json(folder / CONVERSION_RECORD)
            parts = [*record["parts"].values(), record.get(SHARED_FILES, {})]
            files = {name: dict(entry) for part in parts for name, entry in part.items()}
            if all(isinstance(entry["bytes"], int) and isinstance(entry[HASH], str) for entry in files.values()):
                return cls(folder, files)
        except (KeyError, TypeError, AttributeError):
            pass
        raise UserError(f"{folder / CONVERSION_RECORD} is damaged: copy it again")

    @property
    def summary(self) -> str:
        """Return what to tell people once all files were checked."""
        return f"{len(self._files)} files agree" if self._files else "none are recorded"

    def check(self, file: Path) -> None:
        """Raise UserError where a recorded file is missing, cut short, changed or unreadable; other files pass."""
        name = str(file.relative_to(self._folder))
        with self._lock:
            if name not in self._files or name in self._checked:
                return
            with unreadable_is_damaged(file, self._hint):
                if not file.is_file() or file.stat().st_size != self._files[name]["bytes"]:
                    raise UserError(f"{file} is missing or cut short: copy it again{self._hint}")
                if file_digest(file) != self._files[name][HASH]:
                    raise UserError(f"{file} differs from its checksum: copy it again{self._hint}")
            self._checked.add(name)

    def check_share(self, rank: int = 0, size: int = 1) -> None:
        """Apply `check` to a rank's share of the files, dealt out by size. Each of `size` ranks must call this."""
        by_size = sorted(self._files, key=lambda name: (-int(self._files[name]["bytes"]), name))
        for name in by_size[rank::size]:
            self.check(self._folder / name)


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Compute size and checksum of files below the folder, once they are on disk; their bytes are streamed."""
    entries: dict[str, dict[str, Any]] = {}
    for file in filter(Path.is_file, files):
        sync_to_disk(file)  # as a file that a record names must be
        entries[str(file.relative_to(folder))] = {"bytes": file.stat().st_size, HASH: file_digest(file)}
    return entries
