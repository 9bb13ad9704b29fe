"""Worker processes that run a rank's tools, so that a tool that hangs or crashes does not affect the rank.

An environment has a process of its own for an episode; calls of functions share a pool of processes. A process is
reused after a call or an episode without a crash. Processes that a worker has started end with it. Messages are JSON,
see tool_worker.py.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from grpo_mp.rollout.tool_worker import MOST_BYTES
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.processes import shared_environment, with_descendants

IMPORT_LIMIT_S = 600.0  # time limit of the import of tools, which may load models
LISTING_LIMIT_S = 60.0  # time limit of the start of a server and of the list of its tools
Request = tuple[str, str, Mapping[str, Any]]  # path, method and arguments, see tool_worker.py
ENDED_LIMIT_S = 5.0  # time limit of waiting for the exit status of a process that closed its output


class ToolError(Exception):
    """A tool raised an exception, or its worker process has ended."""


class ToolTimeoutError(ToolError):
    """A tool call took longer than `rollout.limits.tool_s`."""


class ToolProcess:
    """One worker process. Its parent is a supervisor process that kills all descendants of the worker when it ends."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()
        self._ended = ""  # how the process ended, for errors; "": it runs

    @property
    def works(self) -> bool:
        return not self._ended

    async def ask(self, name: str, request: Request | None, limit_s: float) -> Any:
        """Send a request and return the result; `request` None: return the first message of the process.

        `name`: name of the tool, for errors. Raises ToolError; ends the process at the time limit and on wrong replies.
        """
        async with self._turn:
            if self._ended:
                raise ToolError(f"{name} cannot be called: its process {self._ended}")
            try:
                async with asyncio.timeout(limit_s):
                    reply = await self._exchange(request)
            except TimeoutError as error:
                await self.end("was ended with a call that took too long")
                raise ToolTimeoutError(f"{name} took longer than {limit_s:g} s") from error
            except (ConnectionError, ValueError) as error:
                how = await self._how_it_ended()
                self.kill(how)
                raise ToolError(f"{name} ended its process, which {how}") from error
            except asyncio.CancelledError:
                self.kill("was ended with a call")
                raise
        if "error" in reply:
            raise ToolError(str(reply["error"]))
        return reply["value"]

    async def _exchange(self, request: Request | None) -> dict[str, Any]:
        requests = self._process.stdin
        replies = self._process.stdout
        assert requests
        assert replies
        if request:
            requests.write(json.dumps(request, default=str).encode() + b"\n")
            await requests.drain()
        reply: dict[str, Any] = json.loads(await replies.readline())
        return reply

    async def _how_it_ended(self) -> str:
        try:
            status = await asyncio.wait_for(self._process.wait(), ENDED_LIMIT_S)
        except TimeoutError:
            return "wrote what is no reply"
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def kill(self, how: str) -> None:
        """Kill the process and its descendants without waiting. `how`: description for later errors."""
        if not self._ended:
            self._ended = how
            with suppress(ProcessLookupError):
                self._process.terminate()  # the supervisor then kills the worker and its descendants
            assert self._process.stdin
            self._process.stdin.close()

    async def end(self, how: str = "was ended") -> None:
        """Kill the process and its descendants and wait until they have ended."""
        self.kill(how)
        await self._how_it_ended()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class ToolProcesses:
    """Pool of a rank's worker processes."""

    paths: tuple[str, ...]  # paths of all tools, 'module:name' or 'file.py:name'
    most: int  # maximum number of concurrent calls of functions
    makers: Mapping[str, Mapping[str, Any]]  # constructor arguments of environment classes, by path
    variables: tuple[str, ...] = ()  # names of environment variables that workers get, in addition to SHARED_VARIABLES
    _idle: list[ToolProcess] = field(default_factory=list)
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_slots", asyncio.Semaphore(self.most))

    async def call(self, name: str, request: Request, limit_s: float, environment: ToolProcess | None = None) -> Any:
        """Call a tool and return its result, see ToolProcess.ask. `limit_s` excludes the wait for a process.

        `environment`: the process of the tool's environment; None: any idle process.
        """
        if environment:
            return await environment.ask(name, request, limit_s)
        async with self._slots:
            process = await self._take()
            try:
                return await process.ask(name, request, limit_s)
            finally:
                self._give_back(process)

    async def make(self, path: str, limit_s: float) -> ToolProcess:
        """Create an environment in a process of its own and return the process, see ToolProcess.ask."""
        process = await self._take()
        try:
            await process.ask(path.rpartition(":")[2], (path, "", {}), limit_s)
        except BaseException:
            process.kill("was ended")
            raise
        return process

    async def drop(self, process: ToolProcess, limit_s: float) -> None:
        """Delete the environment of a process and return the process to the pool; kill a process that fails to."""
        with suppress(ToolError):
            await process.ask("the end of an environment", ("", "", {}), limit_s)
        self._give_back(process)

    async def check(self, servers: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
        """Check that a worker process can import the tools, by starting and ending one.

        `servers`: paths of ListedTools, whose schemas are returned by path. Raises UserError if one gives none.
        """
        process = await self._start()
        try:
            return {path: await self._list(process, path) for path in servers}
        finally:
            await process.end()

    async def _list(self, process: ToolProcess, path: str) -> list[dict[str, Any]]:
        name = path.rpartition(":")[2]
        try:
            await process.ask(name, (path, "", {}), LISTING_LIMIT_S)
            schemas: list[dict[str, Any]] = await process.ask(name, (path, "schemas", {}), LISTING_LIMIT_S)
        except ToolError as error:
            raise UserError(f"rollout.tools {path!r}: {error}") from error
        return schemas

    async def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            await self._idle.pop().end()

    async def _take(self) -> ToolProcess:
        return self._idle.pop() if self._idle else await self._start()

    def _give_back(self, process: ToolProcess) -> None:
        if process.works:
            self._idle.append(process)

    async def _start(self) -> ToolProcess:
        """Start a worker process and wait until it has imported the tools."""
        given = {path: self.makers.get(path) for path in self.paths}
        process = ToolProcess(
            await asyncio.create_subprocess_exec(
                *with_descendants((sys.executable, "-m", "grpo_mp.rollout.tool_worker", json.dumps(given))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**shared_environment(self.variables), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                limit=2 * MOST_BYTES,
                start_new_session=True,  # signals to the rank's process group do not reach tools
            )
        )
        try:
            await process.ask("the import of rollout.tools", None, IMPORT_LIMIT_S)
        except ToolError as error:
            await process.end()
            raise UserError(f"rollout.tools: {error}") from error
        return process
