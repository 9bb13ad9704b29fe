"""Tools of a server that speaks MCP (Model Context Protocol), with the client of the official package `mcp`."""

import asyncio
import importlib
import json
import logging
import os
import re
import shlex
import tempfile
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import IO, Any, TypeVar

import httpx

from grpo_mp.rollout.protocol import BoundedTools, ListedTools, function_schema
from grpo_mp.utils.errors import UserError, one_line

T = TypeVar("T")
SECTION = "rollout.tool_args grpo_mp.rollout.mcp_tools:Server"
VERSIONS = "mcp>=1.24,<2"
LOST = ("Connection closed", "Session terminated")  # messages with which the client of `mcp` reports a lost connection
TAIL_BYTES = 2000  # the end of a server's stderr, in which the reason of a failed start is looked for


class ConnectionLostError(Exception):
    """The server has ended or closed the connection, and the state of the session is lost."""


class ToolCallError(Exception):
    """The server reports that the tool failed."""


class Server(ListedTools, BoundedTools):
    """The tools of one MCP server. Each episode has a session of its own, opened by the episode's first call.

    A server with a command is a process of the episode, so that it may have state. After a lost connection, the next
    call opens a new session.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        url: str = "",
        headers: Mapping[str, str] | None = None,
        parallel: int = 16,
    ) -> None:
        """Check the arguments and import `mcp`; nothing is started.

        `command`: the words of the command line of a server that speaks on stdin and stdout; `url`: address of a
        server that speaks streamable HTTP; `headers`: see fill_in; `parallel`: see BoundedTools.
        """
        if isinstance(command, str) or bool(command) == bool(url):
            raise UserError(f"{SECTION}: set either command, a list of words, or url")
        if not (isinstance(parallel, int) and parallel > 0):
            raise UserError(f"{SECTION}: parallel is {parallel!r}: set a number of calls, 1 or more")
        _library("client.stdio")
        self.parallel = parallel
        self._command = [str(word) for word in command]
        self._url = url
        self._headers = fill_in(headers or {}, SECTION)
        self._connection: _Connection | None = None

    async def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the server's tools. Raises UserError if the server does not start."""
        with tempfile.TemporaryFile() as log:
            connection = await self._connect(log)
        page = await connection.run(connection.session.list_tools())
        listed = [*page.tools]
        while page.nextCursor:
            page = await connection.run(connection.session.list_tools(page.nextCursor))
            listed += page.tools
        if not listed:
            raise UserError(f"the MCP server {self._name} has no tools")
        return [function_schema(tool.name, tool.description or "", tool.inputSchema) for tool in listed]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text; other contents are described, such as `(image/png left out)`.

        Raises ToolCallError if the tool failed, ConnectionLostError if the server ended.
        """
        if self._connection is None:
            with open(os.devnull, "wb") as nowhere:
                await self._connect(nowhere)
        connection = self._connection
        assert connection
        try:
            result = await connection.run(connection.session.call_tool(name, dict(arguments)))
        except ConnectionLostError:
            self._connection = None
            await connection.close()
            raise
        text = "\n".join(map(_as_text, result.content))
        if result.isError:
            raise ToolCallError(text)
        return text or json.dumps(result.structuredContent, ensure_ascii=False)

    @property
    def _name(self) -> str:
        return self._url or f"`{shlex.join(self._command)}`"

    async def _connect(self, log: IO[bytes]) -> "_Connection":
        """Open a session. `log`: file for the stderr of the server."""
        try:
            self._connection = await _Connection.open(self._transport(log))
        except Exception as error:
            reason = error.__cause__ if isinstance(error, ConnectionLostError) else error
            description = f"{type(reason).__name__}: {one_line(reason)}{_last_line(log)}"
            raise UserError(f"the MCP server {self._name} does not start or answer: {description}") from error
        # the worker process lives longer than the episode
        weakref.finalize(self, self._connection.close_after_episode)
        return self._connection

    def _transport(self, log: IO[bytes]) -> AbstractAsyncContextManager[Any]:
        if self._url:
            return _http_transport(self._url, self._headers)
        program, *arguments = self._command
        stdio = _library("client.stdio")
        # the tool's process has no variable that is not meant for tools
        parameters = stdio.StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        transport: AbstractAsyncContextManager[Any] = stdio.stdio_client(parameters, errlog=log)
        return transport


class _Connection:
    """A session with a server, held open by a task, because anyio closes it only in the task that opened it."""

    def __init__(self, transport: AbstractAsyncContextManager[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_open = asyncio.Event()
        self._is_unused = asyncio.Event()
        self._holder = self._loop.create_task(self._hold(transport))
        self.session: Any = None

    @classmethod
    async def open(cls, transport: AbstractAsyncContextManager[Any]) -> "_Connection":
        connection = cls(transport)
        await connection.run(connection._is_open.wait())
        return connection

    async def run(self, request: Coroutine[Any, Any, T]) -> T:
        """Await a request. Raises ConnectionLostError if the connection ends before, or has ended."""
        asked = self._loop.create_task(request)
        await asyncio.wait((asked, self._holder), return_when=asyncio.FIRST_COMPLETED)
        if self._holder.done():
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            reason = _first_cause(self._holder.exception())
            raise ConnectionLostError(f"the server has ended: {type(reason).__name__}: {one_line(reason)}") from reason
        try:
            return await asked
        except Exception as error:
            if str(error) in LOST or type(error).__module__.partition(".")[0] == "anyio":
                raise ConnectionLostError("the server has ended or closed the connection") from error
            raise

    async def close(self) -> None:
        self._is_unused.set()
        await asyncio.gather(self._holder, return_exceptions=True)

    def close_after_episode(self) -> None:
        """Close the connection from outside of the event loop, in which no request is running then."""
        if not self._loop.is_closed() and not self._loop.is_running():
            self._loop.run_until_complete(self.close())

    async def _hold(self, transport: AbstractAsyncContextManager[Any]) -> None:
        make_session = _library("client.session").ClientSession
        async with transport as streams, make_session(*streams[:2]) as self.session:
            await self.session.initialize()
            self._is_open.set()
            await self._is_unused.wait()


def fill_in(headers: Mapping[str, str], section: str) -> dict[str, str]:
    """Return HTTP headers with environment variables for `$NAME`. Raises UserError for one that is not set."""
    if missing := set(re.findall(r"\$\{?(\w+)", " ".join(headers.values()))) - os.environ.keys():
        raise UserError(f"{section}: headers: set ${min(missing)}, and name it in rollout.tool_environment")
    return {name: os.path.expandvars(value) for name, value in headers.items()}


@asynccontextmanager
async def _http_transport(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    # without a limit for reading: `rollout.limits.tool_s` limits calls
    limits = httpx.Timeout(30.0, read=None)
    async with (
        httpx.AsyncClient(headers=headers, timeout=limits, follow_redirects=True) as client,
        _library("client.streamable_http").streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def _library(module: str) -> Any:
    """Return a module of the package `mcp`. Raises UserError where the package is missing."""
    try:
        library = importlib.import_module(f"mcp.{module}")
    except ImportError as error:
        raise UserError(f"{SECTION}: the package is missing here ({error}): pip install {VERSIONS!r}") from error
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # lines that are no messages are logged with a stack trace
    return library


def _as_text(content: Any) -> str:
    if content.type == "text":
        return str(content.text)
    resource = getattr(content, "resource", content)
    if (text := getattr(resource, "text", None)) is not None:
        return str(text)
    return f"({getattr(resource, 'uri', None) or getattr(resource, 'mimeType', content.type)} left out)"


def _first_cause(error: BaseException | None) -> BaseException | None:
    """Return the first error in nested groups of errors, which task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _last_line(log: IO[bytes]) -> str:
    if not log.readable():
        return ""
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = log.read().decode("utf-8", "replace").split("\n")
    written = [line for line in lines if line.strip()]
    return f"; it wrote: {one_line(written[-1])}" if written else ""
