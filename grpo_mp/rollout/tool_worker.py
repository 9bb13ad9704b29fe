"""Main program of a tool worker process: loads the tools and executes requests one at a time.

A message is a line of JSON. A request is [path of the tool, method, arguments]. Path and method
call a method of the process's environment; a path alone calls a function or creates the environment; an empty path
deletes the environment. A reply is an object with `value` or `error`.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.processes import PR_SET_PDEATHSIG, prctl
from grpo_mp.utils.user_code import load_attribute

MOST_BYTES = 2**26  # maximum size of a reply


def serve(tools: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Answer requests from stdin on stdout until stdin is closed. Tools see an empty stdin, and stderr as stdout.

    `tools`: maps the path of an environment class to its constructor arguments, and the path of a function to None.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # a tool must not read requests
        os.dup2(2, 1)  # a tool must not write replies
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent, even if a tool hangs
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # out of memory, the kernel kills this process, not a rank
    try:
        worker = _Worker({path: _load(path, arguments) for path, arguments in tools.items()})
    except UserError as error:
        _send(replies, {"error": str(error)})
        return
    _send(replies, {"value": None})
    for line in requests:
        _send(replies, worker.answer(*json.loads(line)))


def _load(path: str, arguments: Mapping[str, Any] | None) -> Any:
    loaded = load_attribute(path, f"rollout.tools {path!r}")
    return loaded if arguments is None else partial(loaded, **arguments)


class _Worker:
    """Executes requests with the loaded tools, and holds the environment of the current episode."""

    def __init__(self, loaded: Mapping[str, Any]) -> None:
        self._loaded = loaded
        self._environment: Any = None
        self._loop = asyncio.new_event_loop()  # shared by all calls: an environment may keep objects bound to the loop

    def answer(self, path: str, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a request and return the reply; an exception of the tool becomes an `error` reply."""
        try:
            return _as_reply(self._do(path, method, arguments))
        except UserError as error:
            return {"error": one_line(error)}
        except BaseException as error:  # noqa: BLE001 - a tool may raise anything
            return {"error": f"{type(error).__name__}: {one_line(error)}"}

    def _do(self, path: str, method: str, arguments: Mapping[str, Any]) -> Any:
        if not path:
            self._environment = None
            gc.collect()  # the traceback of an exception may hold the environment in a cycle of references
            return None
        value = (getattr(self._environment, method) if method else self._loaded[path])(**arguments)
        if asyncio.iscoroutine(value):
            value = self._loop.run_until_complete(value)
        if not method and isinstance(self._loaded[path], partial):
            self._environment = value
            value = None
        return float(value) if method == "get_reward" else value


def _as_reply(value: Any) -> dict[str, Any]:
    reply = {"value": value.decode("utf-8", "replace") if isinstance(value, bytes) else value}
    if len(json.dumps(reply, default=str)) > MOST_BYTES:
        raise ValueError(f"the result has more than {MOST_BYTES} bytes")
    return reply


def _send(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply, default=str).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
