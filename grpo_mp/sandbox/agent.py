"""Main program of a sandbox: runs commands and copies files. Its source text is passed to Python, never imported.

Command-line argument: the size of the largest file that a command may write, its outputs included [bytes]. Each line of
stdin is a JSON object: the name of a function under "do", and its arguments. A reply is a line with `value` or `error`.
"""

import base64
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FILE_BYTES = int(sys.argv[1])


def run(command: list[str], stdin: str, timeout_s: float, output_bytes: int) -> list[Any]:
    """Run a command; return its exit status, or None after the time limit, and its two outputs."""
    with suppress(ChildProcessError):  # in a container, this process is the parent of processes that lost theirs
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    streams = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    try:
        with open(streams[0], "wb", closefd=False) as given:
            given.write(stdin.encode(errors="replace"))
        os.lseek(streams[0], 0, os.SEEK_SET)
        child = os.fork()
        if not child:
            become(command, streams, int(timeout_s) + 1)
        watch = os.pidfd_open(child)
        ready = select.select([watch, sys.stdin], [], [], timeout_s)[0]
        os.close(watch)
        if sys.stdin in ready:  # closed, since no request comes before the reply: the process that asked has ended
            os._exit(1)
        if not ready:
            os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outputs = [os.pread(stream, output_bytes, 0).decode(errors="replace") for stream in streams[1:]]
    finally:
        for stream in streams:
            os.close(stream)
    return [status if ready else None, *outputs]


def become(command: list[str], streams: list[int], cpu_s: int) -> None:
    """Replace this process, which a fork made, by the command."""
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and commands would inherit that
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def write(path: str, content: str) -> None:
    """Write a file from base64."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(base64.b64decode(content))


def read(path: str) -> str:
    """Return a file as base64."""
    with open(path, "rb") as file:
        return base64.b64encode(file.read()).decode()


FUNCTIONS: dict[str, Callable[..., Any]] = {"run": run, "write": write, "read": read}


def main() -> None:
    """Answer requests until stdin is closed."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            reply = {"value": FUNCTIONS[request.pop("do")](**request)}
        except OSError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
