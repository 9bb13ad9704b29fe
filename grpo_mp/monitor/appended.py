"""Read files of a run again and again as it goes on: of those that grow what was appended, of others what changed."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
COMPARED_BYTES = 64


@dataclass(frozen=True)
class Appended:
    """What a file has more than before. `anew`: it is another file, or gone: forget what was read of it.

    `lines` are complete, without their ends; `rest` may still be written on, and comes again.
    """

    lines: tuple[bytes, ...] = ()
    rest: bytes = b""
    anew: bool = False


class AppendedLines:
    """Reads the lines of a file that grows: each byte of a line that is complete is read once."""

    def __init__(self, file: Path, tail_bytes: int | None = None) -> None:
        """Take a file, which need not be there; `tail_bytes`: of what is there at first only the end is read."""
        self._file, self._tail_bytes = file, tail_bytes
        self._offset, self._inode, self._before = 0, 0, b""

    def read(self) -> Appended:
        """Return what is new. A file that was replaced, as by a run that resumes, or cut is read from its start.

        A new file may have the number of the old one: it is another where the bytes before those that are new are. One
        that cannot be read for now has nothing new.
        """
        try:
            with self._file.open("rb") as stream:
                inode, size, anew = (stat := os.fstat(stream.fileno())).st_ino, stat.st_size, False
                stream.seek(max(0, self._offset - len(self._before)))
                known = inode == self._inode and size >= self._offset and stream.read(len(self._before)) == self._before
                if not known:
                    self._inode, self._offset, self._before, anew = inode, self._first(size), b"", True
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            self._inode, self._offset, self._before = 0, 0, b""
            return Appended(anew=True)
        except OSError:
            return Appended()
        complete, newline, rest = content.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        self._before = (self._before + complete + newline)[-COMPARED_BYTES:]
        lines = tuple(complete.split(b"\n")) if newline else ()
        if anew and self._offset > len(complete) + len(newline):
            lines = lines[1:]  # it is not whole
        return Appended(lines, rest, anew)

    def _first(self, size: int) -> int:
        return 0 if self._tail_bytes is None else max(0, size - self._tail_bytes)


class ChangedFiles:
    """Keeps what was read of files that are written in one go, until they change."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple[int, ...], Any]] = {}
        self._asked: set[Path] = set()

    def read(self, file: Path, parse: Callable[[Path], T]) -> T:
        """Return what `parse` makes of a file; it is called where the file is another than it was. Raises OSError."""
        stat = file.stat()
        mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        self._asked.add(file)
        kept = self._kept.get(file)
        if kept is None or kept[0] != mark:
            kept = self._kept[file] = mark, parse(file)
        value: T = kept[1]
        return value

    def forget_others(self) -> None:
        """Forget the files that were not asked for since the last call."""
        self._kept = {file: kept for file, kept in self._kept.items() if file in self._asked}
        self._asked = set()
