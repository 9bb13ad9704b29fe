"""Write files atomically, and read the last lines of a log."""

import os
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """Write a file in UTF-8 that is complete and on disk, or as it was before; makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.incomplete")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def last_lines(log: Path, count: int) -> tuple[str, ...]:
    """Return the last `count` lines of a log that are not blank; none where it is missing."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return tuple([line for line in lines if line.strip()][-count:])
