"""An interpreter of a model, in the jail of its programs, that runs one piece of code after the other."""

import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path

from grpo_mp.rewards.base import RewardError
from grpo_mp.rewards.sandbox import GRACE_S, Sandbox, open_pipe
from grpo_mp.utils.scratch import ScratchFolder

HARNESS = Path(__file__).with_name("session_harness.py")
INTERRUPT_S = 1.0  # code that its own alarm does not end is killed after this
LONGEST_S = 7 * 86400.0  # the end of a jail that nobody ends


class SessionEndedError(Exception):
    """The interpreter has ended, and its names with it."""


class Session:
    """One interpreter, which ends with `end`, or with this process. Thread-safe: one piece of code runs at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start it, with the limits of the sandbox for each piece of code. Raises RewardError if the jail fails."""
        self._limits, self._lock, self._ended = sandbox.settings, threading.Lock(), False
        with ExitStack() as opened:
            folder = opened.enter_context(ScratchFolder("code"))
            os.chmod(folder, 0o777)  # the program may run as another user
            files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(4)]
            self._code, self._output, stdin, errors = files
            (requests, self._requests), (self._replies, replies) = open_pipe(opened), open_pipe(opened)
            control, self._control = open_pipe(opened)
            job = [self._code.fileno(), requests.fileno(), replies.fileno()]
            self._jail = sandbox.start(
                *(folder, HARNESS, [*map(str, job), str(self._limits.timeout_s)], job),
                *((stdin, self._output, errors), LONGEST_S, control.fileno()),
            )
            for its_own in (requests, replies, control):
                its_own.close()
            self._opened = opened.pop_all()
        if not self._ask(b"", GRACE_S):  # that it does not start is no fault of the first piece of code
            reason = os.pread(errors.fileno(), 2**12, 0).decode(errors="replace") or "it does not answer"
            self.end()
            raise RewardError(f"the interpreter could not be isolated: {reason}")

    def run(self, code: str) -> str:
        """Return what the code prints, and the value of its last line. Raises SessionEndedError."""
        with self._lock:
            if self._ended or not self._ask(code.encode(errors="replace"), self._limits.timeout_s + INTERRUPT_S):
                self.end()
                raise SessionEndedError("the interpreter was ended, and its names are lost: the code ended or held it")
            return os.pread(self._output.fileno(), self._limits.output_bytes, 0).decode(errors="replace").rstrip("\n")

    def end(self) -> None:
        """End the interpreter, and all that it has started."""
        if self._ended:
            return
        self._ended = True
        self._control.close()
        try:
            self._jail.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._jail.pid, signal.SIGKILL)
            self._jail.wait()
        self._opened.close()

    def _ask(self, code: bytes, limit_s: float) -> bool:
        """Run code; return whether the interpreter has answered in time."""
        for file in (self._code, self._output):
            file.seek(0)  # what the interpreter writes begins here, too
            file.truncate()
        self._code.write(code)
        self._code.flush()
        with suppress(BrokenPipeError):
            request, reply, deadline = secrets.token_hex(16).encode() + b"\n", b"", time.monotonic() + limit_s
            self._requests.write(request)
            while not reply.endswith(request):  # the code may write there, too
                ready = wait([self._replies.fileno()], max(0.0, deadline - time.monotonic()))
                if not (ready and (piece := self._replies.read(2**12))):
                    return False
                reply = (reply + piece)[-len(request) :]
            return True
        return False
