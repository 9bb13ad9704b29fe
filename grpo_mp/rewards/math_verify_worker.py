"""math-verify in a process of its own, where a time limit holds.

math-verify limits its time with SIGALRM, which works in a main thread only, and no signal handler and no thread runs
while one long operation on big integers holds the interpreter: an answer like `10^{10^{10}}` could stop the rank. So a
small child process computes and the parent kills it when time is up. The child limits its own processor time and memory
too: it ends soon even if the parent is killed first.
"""

import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from grpo_mp.errors import UserError

START_LIMIT_S = 120.0
MEMORY_BYTES = 4 * 2**30
TOLERANCE = 0.01
ROUNDING = 1e-12  # 7.01 - 7 is no more than 0.01


def close(expected: float, found: float, tolerance: float) -> bool:
    """Whether a number is near enough: within `tolerance`, and where the expected number is smaller than 1, within
    that share of it. So 0 is not 0.005, and nothing but 0 is 0.
    """
    return abs(expected - found) <= tolerance * min(1.0, abs(expected)) + ROUNDING * min(1.0, abs(expected))


class Equality:
    """Is an answer mathematically equal to the expected one? Safe to share between threads; `close` ends the child."""

    def __init__(self, limit_s: float, tolerance: float = TOLERANCE) -> None:
        """`limit_s`: seconds for one comparison, after which answers count as different; `tolerance` as of `close`."""
        self.limit_s, self.tolerance = limit_s, tolerance
        self.timeouts = 0  # comparisons that were given up
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, expected: str, found: str) -> bool:
        """False also when the limit passed or the child died of the expression. Raises UserError if it cannot start."""
        with self._lock:
            child = self._child or self._start()
            reply = _exchange(child, json.dumps([expected, found, self.tolerance, self.limit_s]), self.limit_s)
            if reply is None:
                self.timeouts += 1
                self._end()
            return reply == "equal"

    def close(self) -> None:
        """End the child process; a later comparison starts a new one."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        complaints = tempfile.TemporaryFile()  # noqa: SIM115 - the child keeps it; a pipe nobody reads would fill up
        self._child = subprocess.Popen(
            [sys.executable, "-m", "grpo_mp.rewards.math_verify_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,  # a signal to the rank's group must not turn the answer in hand into a wrong one
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
        if _read_line(self._child, START_LIMIT_S) != "ready":
            self._end()
            complaints.seek(0)
            reason = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"reward.answer: math-verify did not start in {START_LIMIT_S:.0f} s: {' '.join(reason)}")
        return self._child

    def _end(self) -> None:
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _exchange(child: subprocess.Popen[bytes], question: str, limit_s: float) -> str | None:
    assert child.stdin is not None
    try:
        child.stdin.write(question.encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    return _read_line(child, limit_s)


def _read_line(child: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """The child's next line; None if it ended or said nothing in time."""
    assert child.stdout is not None
    descriptor, deadline, line = child.stdout.fileno(), time.monotonic() + limit_s, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(descriptor, 4096) if ready else b""
        if not piece:
            return None
        line += piece
    return line.decode().strip()


def _answer_questions() -> None:
    """The child's loop: one question per line on stdin, one verdict per line on stdout."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not pass for a reply
    _is_equal("1", "x", 0.0)  # imports and grammar tables load now, not in the first comparison's time
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    replies.write("ready\n")
    for line in sys.stdin:
        expected, found, tolerance, limit_s = json.loads(line)
        _limit_processor_time(limit_s)
        replies.write("equal\n" if _is_equal(expected, found, tolerance) else "different\n")


def _limit_processor_time(limit_s: float) -> None:
    """From now on, `limit_s` more seconds and a few: then the kernel ends this process, whatever it does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + limit_s) + 2, hard))


def _is_equal(expected: str, found: str, tolerance: float) -> bool:
    """As math-verify compares, or as `close` does if both are numbers. Its time limits are off: the parent's holds."""
    from math_verify import parse, verify

    ours, theirs = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (expected, found))
    if verify(ours, theirs, timeout_seconds=None):
        return True
    try:
        return close(float(ours[0]), float(theirs[0]), tolerance)
    except (IndexError, TypeError, ValueError, OverflowError, MemoryError):
        return False


if __name__ == "__main__":
    _answer_questions()
