"""Python interpreter as a tool, in a sandbox; variables persist over the turns of an episode."""

import json
import os
import secrets
import subprocess
import threading
import time
import weakref
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

from grpo_mp.rollout.protocol import BoundedTools
from grpo_mp.sandbox.sandboxes import GRACE_S, PARALLEL, Sandboxes

SECTION = "rollout.tool_args grpo_mp.rollout.python_tool:Python"
INTERPRETER = Path(__file__).with_name("python_session.py").read_text()
INTERRUPT_S = 1.0  # the interpreter is killed this long after the time limit, if its alarm did not interrupt the code


class SessionEndedError(Exception):
    """The interpreter has ended, and its variables are lost."""


class Session:
    """A sandboxed interpreter that lives until `end` or the end of this process. Runs one piece of code at a time."""

    def __init__(self, sandboxes: Sandboxes, timeout_s: float) -> None:
        """Start the interpreter and wait for it.

        Raises SessionEndedError if it does not answer.
        """
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        streams = (subprocess.PIPE, subprocess.PIPE, subprocess.DEVNULL)
        self._process = sandboxes.popen(INTERPRETER, [str(self._timeout_s)], streams)
        self._ask("", GRACE_S)  # so that the start does not count toward the first code's time limit

    def run(self, code: str) -> str:
        return self._ask(code, self._timeout_s + INTERRUPT_S)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, code: str, limit_s: float) -> str:
        token = secrets.token_hex(16)
        with self._lock:
            try:
                self._process.stdin.write(json.dumps([token, code]).encode() + b"\n")  # type: ignore[union-attr]
                self._process.stdin.flush()  # type: ignore[union-attr]
                answer = self._read(token.encode(), limit_s)
            except (BrokenPipeError, ValueError):
                answer = None
            if answer is None:
                self.end()
                raise SessionEndedError("the interpreter was ended, and its names are lost: the code ended or held it")
        return str(json.loads(answer)).rstrip("\n")

    def _read(self, token: bytes, limit_s: float) -> bytes | None:
        """Return the reply after `token`, which tells it from output that the code writes to the same pipe.

        Returns None if there is no reply within `limit_s`.
        """
        descriptor = self._process.stdout.fileno()  # type: ignore[union-attr]
        deadline = time.monotonic() + limit_s
        text = b""
        while True:
            ready = wait([descriptor], max(0.0, deadline - time.monotonic()))
            if not (ready and (piece := os.read(descriptor, 2**16))):
                return None
            text += piece
            _, found, answer = text.rpartition(b"\n" + token)
            if found and answer.endswith(b"\n"):
                return answer


class Python(BoundedTools):
    """Tool with one interpreter process for each episode, started by the first call."""

    parallel = PARALLEL

    def __init__(self, timeout_s: float = 5.0, sandbox: str = "bubblewrap") -> None:
        """Check the sandbox. `timeout_s`: time limit of one call; `sandbox`: its kind, see Sandboxes."""
        self._timeout_s = timeout_s
        self._sandboxes = _sandboxes(sandbox)
        self._session: Session | None = None

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, and the value of its last line. Names are kept for later calls.

        Args:
            code: the code to run
        """
        if self._session is None:
            self._session = Session(self._sandboxes, self._timeout_s)
            weakref.finalize(self, self._session.end)
        try:
            return self._session.run(code)
        except SessionEndedError:
            self._session = None
            raise


@cache
def _sandboxes(kind: str) -> Sandboxes:
    return Sandboxes(SECTION, kind)
