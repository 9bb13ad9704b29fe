"""Temporary folders of processes; what one leaves that is killed is removed by a later one of the same user."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PREFIX = "grpo_mp-"
YOUNG_S = 3600.0  # younger folders stay: one that is just made is not locked yet


class ScratchFolder:
    """A new folder below TMPDIR, locked by this process (flock(2)) as long as that lives, or until it is removed."""

    def __init__(self, kind: str) -> None:
        """Make it; `kind`: a word of its name."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # where file systems lock no folders, nobody removes them
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove the folder, if it is still there, and its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Path:
        """Return its path."""
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove it."""
        self.remove()


def remove_abandoned() -> None:
    """Remove folders of this user whose processes have ended without doing so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process removes it, or it is none of ours
            status = folder.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_ctime > YOUNG_S:
                _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
