"""One program of a model, run under limits in namespaces of its own (see jail.py)."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from grpo_mp.rewards.base import RewardError
from grpo_mp.rewards.settings import SandboxLimits
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.scratch import ScratchFolder, remove_abandoned

JAIL, HARNESS = (Path(__file__).with_name(name) for name in ("jail.py", "harness.py"))
FOLDER_FILES = 16  # the program's folder holds this many files of the largest size
GRACE_S = 10.0  # the jail ends by itself; after this it is killed
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/program", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    passed: bool  # all tests ran to their end; without tests: status 0
    output: str  # its stdout, up to the limit


class Sandbox:
    """Runs programs. Thread-safe."""

    def __init__(self, settings: SandboxLimits, section: str = "reward.code") -> None:
        """Try one empty program. Raises UserError where it fails, or isolation is required and not available.

        `section`: of the settings, for the sentence.
        """
        remove_abandoned()
        self.settings, self._section = settings, section
        self.isolated = True  # programs run in namespaces; else files and network may be open to them
        reason = self._start_failure()
        if reason and settings.isolation == "required":
            raise UserError(
                f"{section}.isolation: this machine gives programs no namespaces of their own ({reason}): allow "
                "unprivileged user namespaces, or set best_effort to run programs that you trust with limits only"
            )
        self.isolated = not reason
        if reason and (reason := self._start_failure()):
            raise UserError(f"{section}: programs cannot be started here ({reason}): run as a user other than root")

    def run(self, program: str, tests: str | None, stdin: str, timeout_s: float) -> Outcome:
        """Run `program`, and `tests` in a process that calls it. Raises RewardError if the jail itself fails."""
        token = secrets.token_hex(16)
        with ExitStack() as opened:
            folder = opened.enter_context(ScratchFolder("code"))
            os.chmod(folder, 0o777)  # the program may run as another user
            files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(6)]
            *job, stdin_file, output, stderr = files
            program_file, tests_file, verdict = job
            _write(program_file, program.encode(errors="replace"))
            _write(tests_file, _length_prefixed(tests or "") + token.encode())
            _write(stdin_file, stdin.encode(errors="replace"))
            used = job[:1] if tests is None else job
            numbers = [file.fileno() for file in used]
            control, _held = open_pipe(opened)  # the program ends with this process, too
            jail = self.start(folder, HARNESS, [*map(str, numbers)], numbers, files[3:], timeout_s, control.fileno())
            control.close()
            status = self._wait(jail, timeout_s)
            if reason := _read(stderr):
                raise RewardError(f"the program could not be isolated: {reason}")
            passed = status == 0 if tests is None else _read(verdict) == token
            return Outcome(passed, _read(output))

    def start(
        self,
        folder: Path,
        harness: Path,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        streams: Sequence[IO[bytes]],
        timeout_s: float,
        control: int,
    ) -> subprocess.Popen[bytes]:
        """Start the jail of one program, which ends with it.

        `harness`: what the interpreter runs, with `arguments` and open `descriptors`; `streams`: stdin, stdout and the
        jail's stderr; `control`: a pipe, whose other end ends the program when it is closed.
        """
        stdin, stdout, stderr = streams
        limits = self.settings
        settings = {
            "isolate": self.isolated,
            "folder": str(folder),
            "harness": str(harness),
            "python": sys.executable,
            "visible": sorted({sys.prefix, sys.base_prefix}),
            "arguments": [*arguments],
            "control": control,
            "environment": ENVIRONMENT,
            "timeout_s": timeout_s,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "folder_bytes": limits.output_bytes * FOLDER_FILES,
            "processes": limits.processes,
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(JAIL), json.dumps(settings)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[*descriptors, control],
            cwd=folder,
            env={},
            start_new_session=True,
        )

    def _wait(self, jail: subprocess.Popen[bytes], timeout_s: float) -> int:
        try:
            return jail.wait(timeout_s + GRACE_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(jail.pid, signal.SIGKILL)
            jail.wait()
            raise RewardError(f"the program did not end {GRACE_S:g} s after its limit") from error

    def _start_failure(self) -> str:
        """Return why an empty program cannot be isolated; empty if it can. Raises UserError where the limits end it."""
        try:
            outcome = self.run("", "", "", GRACE_S)
        except RewardError as error:
            return str(error)
        if not outcome.passed:
            raise UserError(
                f"{self._section}: an empty program fails under its limits: raise {self._section}.memory_bytes="
                f"{self.settings.memory_bytes} or {self._section}.output_bytes={self.settings.output_bytes}"
            )
        return ""


def open_pipe(opened: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return both ends of a pipe, unbuffered, the one to read from first; `opened` closes what is still open."""
    read_end, write_end = os.pipe()
    return (
        opened.enter_context(open(read_end, "rb", buffering=0)),
        opened.enter_context(open(write_end, "wb", buffering=0)),
    )


def _length_prefixed(text: str) -> bytes:
    """Encode tests as harness.py reads them."""
    content = text.encode(errors="replace")
    return b"%016d" % len(content) + content


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.seek(0)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").rstrip("\n")
