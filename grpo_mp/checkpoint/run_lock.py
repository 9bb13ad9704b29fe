"""Lock of a run folder, so that only one job at a time writes into it."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from grpo_mp.utils.errors import UserError

LOCK = "job.lock"
WAIT_S = 120.0  # an NFS server keeps the locks of a dead host for a lease of 90 s
POLL_S = 0.2
UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
HELD = frozenset({errno.EACCES, errno.EAGAIN})
LOGGER = logging.getLogger(__name__)


@contextmanager
def run_lock(folder: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the run folder's lock inside the context; wait up to `wait_s` seconds for another job to release it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        deadline_s = time.monotonic() + wait_s
        message = ""
        while not _take(file):
            if not message:
                file.seek(0)
                message = f"{folder}: another job writes there ({file.read().strip()})"
                LOGGER.warning("%s: waiting up to %g s for it", message, wait_s)
            if time.monotonic() > deadline_s:
                raise UserError(f"{message}: stop it, or choose another run.folder")
            time.sleep(POLL_S)
        file.truncate(0)
        job = os.environ.get("SLURM_JOB_ID")
        file.write(f"host {socket.gethostname()}, process {os.getpid()}{f', Slurm job {job}' if job else ''}\n")
        file.flush()
        yield


def _take(file: IO[str]) -> bool:
    # A POSIX record lock, because child processes do not inherit it and network file systems support it.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            return False
        if error.errno not in UNSUPPORTED:
            raise
        LOGGER.warning("%s: the file system has no locks: start no second job there", file.name)
    return True
