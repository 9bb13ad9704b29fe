"""A child process that answers requests under a time limit."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

from grpo_mp.utils.errors import one_line


class WorkerEndedError(Exception):
    """A worker ended, or did not answer within the time limit and was killed."""


class JsonWorker:
    """A child process that answers one request at a time until its stdin is closed. Thread-safe.

    A request is one line of JSON on stdin. A reply is one line of JSON on stdout: an object with `value` or `error`.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        """Wrap a running process whose stdin and stdout are pipes.

        If stderr is a pipe, it is read only by `end`: the process must write at most 64 KiB to it, or it blocks.
        """
        self.process = process
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], limit_s: float) -> Any:
        """Return the `value` of the reply.

        Raises OSError for an `error`; WorkerEndedError, with the stderr of the process, if it does not reply.
        """
        with self._lock:
            try:
                self.process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
                self.process.stdin.flush()  # type: ignore[union-attr]
                reply = dict(json.loads(self._read_line(time.monotonic() + limit_s)))
            except (BrokenPipeError, ValueError, TypeError):  # the process has ended, or its line is not a JSON object
                reply = {}
        if "error" in reply:
            raise OSError(reply["error"])
        if "value" not in reply:
            raise WorkerEndedError(one_line(self.end()) or "the process does not answer")
        return reply["value"]

    def end(self) -> str:
        """Kill the process and return its stderr; return "" if the process was ended before."""
        self.process.kill()
        try:
            _, stderr = self.process.communicate()
        except ValueError:  # ended before
            return ""
        return (stderr or b"").decode(errors="replace").strip()

    def _read_line(self, deadline: float) -> bytes:
        descriptor = self.process.stdout.fileno()  # type: ignore[union-attr]
        pieces = list[bytes]()
        while not (pieces and pieces[-1].endswith(b"\n")):
            ready = wait([descriptor], max(0.0, deadline - time.monotonic()))
            if not (ready and (piece := os.read(descriptor, 2**20))):
                break
            pieces.append(piece)
        return b"".join(pieces)
