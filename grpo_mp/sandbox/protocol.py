"""Interface of a sandbox, and the limits and results of its commands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class SandboxError(Exception):
    """A sandbox cannot be started or reached."""


@dataclass(frozen=True)
class Limits:
    """Limits of a sandbox."""

    memory_bytes: int = 2**29  # address space of each process
    processes: int = 16  # processes and threads
    file_bytes: int = 2**20  # size of one file, the output of a command included
    folder_bytes: int = 2**24  # size of the working folder
    output_bytes: int = 2**20  # returned of each output of a command; the rest is left out
    network: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    status: int | None  # exit status, or minus the signal that ended the command; None: the time limit
    stdout: str
    stderr: str = ""


class Sandbox(Protocol):
    """A folder and processes. A class of your own is called as `Class(limits)`, which starts a sandbox.

    Methods are called from one thread at a time. They raise SandboxError if the sandbox fails, WorkerEndedError
    if a program has ended it.
    """

    def exec(self, command: Sequence[str], stdin: str = "", timeout_s: float = 60.0) -> Outcome:
        """Run a command in the working folder; at the time limit, kill it and the processes of its group."""

    def write(self, path: str, content: bytes) -> None:
        """Write a file, and create its folders. `path`: relative to the working folder."""

    def read(self, path: str) -> bytes:
        """Return the content of a file. Raises OSError if it cannot be read."""

    def stop(self) -> None:
        """End all processes and remove all files."""
