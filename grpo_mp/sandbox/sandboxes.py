"""Start sandboxes on this machine, or run programs on a sandbox server."""

import base64
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx

from grpo_mp.sandbox.commands import isolate
from grpo_mp.sandbox.protocol import Limits, Outcome, Sandbox, SandboxError
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.json_worker import JsonWorker, WorkerEndedError
from grpo_mp.utils.user_code import load_attribute

PARALLEL = 4  # programs that run at one time on one rank: each may use a core
GRACE_S = 10.0  # added to the time limit of a command, for the reply
START_S = 60.0  # limit of the start of a sandbox: Docker may be slow
DEFAULT_LIMITS = Limits()
AGENT = Path(__file__).with_name("agent.py").read_text()
CONTAINERS = ("docker", "podman")
KINDS = ("bubblewrap", *CONTAINERS)
OTHERS = "or name another sandbox, such as docker:IMAGE or a server's URL"


class LocalSandbox(JsonWorker):
    """A sandbox whose agent.py is a child of this process. All its processes end with the agent."""

    def __init__(self, process: "subprocess.Popen[bytes]", limits: Limits) -> None:
        super().__init__(process)
        self._limits = limits

    def exec(self, command: Sequence[str], stdin: str = "", timeout_s: float = 60.0) -> Outcome:
        most = self._limits.output_bytes
        request = {"do": "run", "command": list(command), "stdin": stdin, "timeout_s": timeout_s, "output_bytes": most}
        return Outcome(*self.ask(request, timeout_s + GRACE_S))

    def write(self, path: str, content: bytes) -> None:
        self.ask({"do": "write", "path": path, "content": base64.b64encode(content).decode()}, START_S)

    def read(self, path: str) -> bytes:
        return base64.b64decode(self.ask({"do": "read", "path": path}, START_S))

    def stop(self) -> None:
        self.end()


class Sandboxes:
    """Starts sandboxes of one kind without network and with limits of time, memory, output and processes. Thread-safe.

    `kind`: "bubblewrap": with the programs of this machine; "bubblewrap:FOLDER": with a root file system;
    "docker:IMAGE", "podman:IMAGE"; "https://...": a server with SandboxFusion's API run_code, which
    only runs single programs; "file.py:Class" or "module:Class": a class of your own, see Sandbox.
    """

    def __init__(self, section: str, kind: str = "bubblewrap", limits: Limits = DEFAULT_LIMITS) -> None:
        """Check the sandbox with an empty program. `section`: of the settings, for messages."""
        self._kind, _, self._image = kind.partition(":")
        self._url = kind.rstrip("/") if kind.startswith(("http://", "https://")) else None
        self._limits = limits
        self._class = None if self._url or self._kind in KINDS else load_attribute(kind, section)
        try:
            outcome = self.run("", "", GRACE_S)
        except SandboxError as error:
            in_container = f"find out why `{self._kind} run {self._image}` fails here"
            remedy = in_container if self._kind in CONTAINERS else "install bubblewrap and allow user namespaces"
            failure = f"{section}: programs cannot be isolated by {kind} ({error})"
            raise UserError(f"{failure}: {remedy}, {OTHERS}") from error
        if outcome.status != 0:
            reason = outcome.stderr or outcome.stdout or "it prints nothing"
            raise UserError(f"{section}: an empty program fails in the sandbox: {reason}")

    def run(self, program: str, stdin: str, timeout_s: float) -> Outcome:
        """Run a Python program in a new sandbox. Raises SandboxError if the sandbox cannot be started."""
        if self._url:
            return self._run_on_server(program, stdin, timeout_s)
        sandbox = self.start()
        try:
            sandbox.write("main.py", program.encode(errors="replace"))
            return sandbox.exec(["python3", "-I", "-B", "main.py"], stdin, timeout_s)
        except WorkerEndedError:  # the program ended it
            return Outcome(None, "")
        finally:
            sandbox.stop()

    def start(self) -> Sandbox:
        """Start a sandbox, which ends by its `stop` or with this process."""
        if self._class:
            sandbox: Sandbox = self._class(self._limits)
            return sandbox
        local = LocalSandbox(self.popen(AGENT, str(self._limits.file_bytes)), self._limits)
        try:
            local.exec(["true"])
        except WorkerEndedError as error:
            raise SandboxError(str(error)) from error
        return local

    def popen(self, program: str, argument: str) -> "subprocess.Popen[bytes]":
        """Start a Python program in a sandbox of its own, with pipes as stdin, stdout and stderr.

        The sandbox ends with the program or with this process.
        """
        if self._url or self._class:
            raise SandboxError(f"it needs a sandbox of the kinds {', '.join(KINDS)}")
        command = isolate(self._kind, self._image, self._limits, program, [argument])
        popen = Container if self._kind in CONTAINERS else subprocess.Popen[bytes]
        pipe = subprocess.PIPE
        # bwrap ends with the thread that starts it, so that thread must live as long as this process.
        return _spawner(os.getpid()).submit(popen, command, stdin=pipe, stdout=pipe, stderr=pipe).result()

    def _run_on_server(self, program: str, stdin: str, timeout_s: float) -> Outcome:
        """Run a program with SandboxFusion's API run_code."""
        body = {
            "code": program,
            "language": "python",
            "stdin": stdin,
            "run_timeout": timeout_s,
            "memory_limit_MB": self._limits.memory_bytes // 2**20,
        }
        try:
            reply = httpx.post(f"{self._url}/run_code", json=body, timeout=timeout_s + GRACE_S)
            answer: dict[str, Any] = reply.raise_for_status().json()
            result = answer["run_result"]
            if answer["status"] == "SandboxError" or result is None:
                raise SandboxError(f"{self._url}: the sandbox server failed: {answer.get('message')}")
            status = int(result["return_code"]) if result["status"] == "Finished" else None
            return Outcome(status, result["stdout"] or "", result.get("stderr") or "")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise SandboxError(
                f"{self._url}: no answer of a sandbox server: {type(error).__name__}: {error}"
            ) from error


class Container(subprocess.Popen[bytes]):
    """Client of a container. A killed client may leave its container behind, so `kill` removes the container first."""

    def kill(self) -> None:
        program, _, _, name, *_ = cast(list[str], self.args)
        subprocess.run([program, "rm", "--force", name], capture_output=True, timeout=START_S, check=False)
        super().kill()


@cache
def check_container_program(section: str, program: str) -> None:
    """Check that docker or podman answers, where images are named by data rows. Raises UserError if it does not."""
    try:
        reply = subprocess.run([program, "version"], capture_output=True, text=True, timeout=START_S, check=False)
        failure = (reply.stderr.strip() or f"exit status {reply.returncode}") if reply.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        raise UserError(f"{section}: `{program} version` fails here ({failure}): start its service, {OTHERS}")


@cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return the thread that starts sandboxes; by process id, because a forked process has no threads."""
    return ThreadPoolExecutor(1, "sandbox")
