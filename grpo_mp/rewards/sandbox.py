"""Run the policy's programs in bubblewrap on this machine, or on a sandbox server."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import httpx

from grpo_mp.rewards.base import RewardError
from grpo_mp.utils.errors import UserError

MEMORY_BYTES = 2**29  # address space of each process of a program
PARALLEL = 4  # programs that run at one time on one rank: each may use a core
OUTPUT_BYTES = 2**20  # largest file that a program may write, its stdout included
FOLDER_BYTES = 16 * OUTPUT_BYTES  # size of the program's own folder, a tmpfs
PROCESSES = 16  # limit of processes and threads of one program
GRACE_S = 10.0  # added to the time limit of a program, for the reply of a server
NOBODY = "65534"
FOLDER = Path("/program")
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": str(FOLDER), "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
TOOLS = ("bwrap:", "setpriv:", "prlimit:")  # beginnings of stderr if the sandbox fails, not the program


@dataclass(frozen=True)
class Outcome:
    """Result of a program."""

    succeeded: bool  # exited with status 0 within the time limit
    output: str  # stdout, at most OUTPUT_BYTES


class Sandbox:
    """Runs Python programs without network and with limits of time, memory, output and processes. Thread-safe."""

    def __init__(self, section: str = "reward.code", url: str | None = None) -> None:
        """Check the sandbox with an empty program.

        section: of the settings, for messages; url: of a sandbox server, None: bubblewrap on this machine.
        """
        self._url = url
        try:
            outcome = self.run("", "", GRACE_S)
        except RewardError as error:
            remedy = "install bubblewrap and allow user namespaces, or set reward.code.url to a sandbox server"
            raise UserError(f"{section}: programs cannot be isolated here ({error}): {remedy}") from error
        if not outcome.succeeded:
            raise UserError(
                f"{section}: an empty program fails in the sandbox: {outcome.output or 'it prints nothing'}"
            )

    def run(self, program: str, stdin: str, timeout_s: float) -> Outcome:
        """Run a program until it ends or reaches the time limit. Raises RewardError if the sandbox itself fails."""
        if self._url:
            return self._run_on_server(self._url, program, stdin, timeout_s)
        with ExitStack() as opened:
            given, output, stderr = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
            process = self.start(program, (), (given, output, stderr), cpu_s=int(timeout_s) + 1)
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status and (reason := _read(stderr)).startswith(TOOLS):
                raise RewardError(f"the program could not be isolated: {reason}")
            return Outcome(status == 0, _read(output))

    def start(
        self, program: str, arguments: Sequence[str], streams: Sequence[IO[bytes] | int], cpu_s: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program in bubblewrap. All its processes end when bubblewrap or this process is killed.

        streams: stdin, stdout and stderr; cpu_s: limit of each process's CPU time, in seconds.
        """
        stdin, stdout, stderr = streams
        with tempfile.TemporaryFile() as source:
            source.write(program.encode(errors="replace"))
            source.seek(0)
            command = self._command(source.fileno(), arguments, cpu_s)
            try:
                # bwrap ends with the thread that starts it, so that thread must live as long as this process.
                return (
                    _spawner(os.getpid())
                    .submit(
                        subprocess.Popen, command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[source.fileno()]
                    )
                    .result()
                )
            except FileNotFoundError:
                raise RewardError("bubblewrap (bwrap) is not installed") from None

    def _command(self, source: int, arguments: Sequence[str], cpu_s: int | None) -> list[str]:
        is_root = os.geteuid() == 0
        script = FOLDER / "main.py"
        limits = {
            "as": MEMORY_BYTES,
            "fsize": OUTPUT_BYTES,
            "nproc": PROCESSES,
            "core": 0,
            **({"cpu": cpu_s} if cpu_s else {}),
        }
        # The kernel exempts root from the limit of processes, so under root the program runs as another user.
        privileges = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
        user = [*("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--no-new-privs")]
        return [
            *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--new-session"),
            *([f for name in privileges for f in ("--cap-add", name)] if is_root else ["--unshare-user"]),
            *("--clearenv", *(word for pair in ENVIRONMENT.items() for word in ("--setenv", *pair))),
            *_visible(),
            *("--size", str(FOLDER_BYTES), "--perms", "0777", "--tmpfs", str(FOLDER)),
            *("--file", str(source), str(script), "--chmod", "0444", str(script)),
            *("--remount-ro", "/", "--chdir", str(FOLDER)),
            *([*user, "--inh-caps=-all", "--bounding-set=-all"] if is_root else []),
            *("prlimit", *(f"--{name}={value}" for name, value in limits.items())),
            *(sys.executable, "-I", "-B", str(script), *arguments),
        ]

    def _run_on_server(self, url: str, program: str, stdin: str, timeout_s: float) -> Outcome:
        """Run a program with SandboxFusion's API run_code."""
        body = {
            "code": program,
            "language": "python",
            "stdin": stdin,
            "run_timeout": timeout_s,
            "memory_limit_MB": MEMORY_BYTES // 2**20,
        }
        try:
            reply = httpx.post(f"{url.rstrip('/')}/run_code", json=body, timeout=timeout_s + GRACE_S)
            answer: dict[str, Any] = reply.raise_for_status().json()
            result = answer["run_result"]
            if answer["status"] == "SandboxError" or result is None:
                raise RewardError(f"{url}: the sandbox server failed: {answer.get('message')}")
            succeeded = result["status"] == "Finished" and result["return_code"] == 0
            return Outcome(succeeded, (result["stdout"] or "").rstrip("\n"))
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise RewardError(f"{url}: no answer of a sandbox server: {type(error).__name__}: {error}") from error


@cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return the thread that starts sandboxes; by process id, because a forked process has no threads."""
    return ThreadPoolExecutor(1, "sandbox")


def _visible() -> list[str]:
    """Return bubblewrap's arguments that mount files of the system and this Python read-only, and a few devices."""
    arguments = list[str]()
    for name in (*SYSTEM, *sorted({sys.prefix, sys.base_prefix})):
        if os.path.islink(name) and not os.path.isabs(os.readlink(name)):  # such as /lib -> usr/lib
            arguments += ["--symlink", os.readlink(name), name]
            continue
        # Other users cannot enter parent folders that bwrap creates by itself.
        for parent in reversed(Path(name).parents[:-1]):
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += ["--ro-bind-try", name, name]
    arguments += ["--perms", "0755", "--dir", "/dev"]
    return [*arguments, *(word for name in DEVICES for word in ("--dev-bind-try", name, name))]


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(OUTPUT_BYTES).decode(errors="replace").rstrip("\n")
