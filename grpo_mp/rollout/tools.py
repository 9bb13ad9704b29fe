"""Tools of an episode: typed functions or methods of classes, called in worker processes (TRL's `tools`)."""

import asyncio
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.utils import get_json_schema

from grpo_mp.rollout.protocol import BoundedTools, ListedTools, ToolCall, ToolResult
from grpo_mp.rollout.tool_processes import ToolError, ToolProcess, ToolProcesses, ToolTimeoutError
from grpo_mp.utils.errors import UserError, did_you_mean, one_line, refuse_failures
from grpo_mp.utils.files import encodable
from grpo_mp.utils.user_code import load_attribute

SETTING = "rollout.tools"
RESET = "reset"
REWARD = "get_reward"
OF_EPISODES = (RESET, REWARD)  # methods that the policy does not call
PROCESSES = 16  # maximum number of concurrent calls of functions on one rank


@dataclass(frozen=True)
class Tool:
    """A function, a method of an environment class, or a tool of ListedTools, which its method `call` calls.

    `slots`: limits concurrent calls of BoundedTools.
    """

    name: str  # for messages, with the name of the class
    path: str
    method: str = ""
    slots: asyncio.Semaphore | None = None
    listed: str = ""  # name in ListedTools


@dataclass(frozen=True)
class ToolKit:
    """The tools in the settings: functions, and environment classes, of which each episode gets an instance.

    The public methods of a class are tools, with two exceptions (as in TRL's `environment_factory`). `reset` is called
    with the columns of the data row at the start of an episode and returns text to append to the prompt. `get_reward`
    is called without arguments at the end of the episode.
    """

    tools: Mapping[str, Tool] = field(default_factory=dict)  # by the name that the policy calls
    resets: tuple[Tool, ...] = ()
    rewards: tuple[Tool, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()
    processes: ToolProcesses = field(default_factory=lambda: ToolProcesses((), PROCESSES, {}))

    async def open(self, limit_s: float, characters: int) -> "EpisodeTools":
        """Create the environments of one episode and return its tools; the caller must call `close` at the end.

        `limit_s`: time limit of a call [s]; `characters`: maximum length of a result.
        """
        environments = dict[str, ToolProcess]()
        async with AsyncExitStack() as opened:
            for path in self.processes.makers:
                environments[path] = await self.processes.make(path, limit_s)
                opened.push_async_callback(self.processes.drop, environments[path], limit_s)
            return EpisodeTools(self, environments, limit_s, characters, opened.pop_all().aclose)

    async def close(self) -> None:
        await self.processes.close()


@dataclass(frozen=True)
class EpisodeTools:
    """The tools and environments of one episode. `environments`: their processes, by path."""

    kit: ToolKit
    environments: Mapping[str, ToolProcess]
    limit_s: float
    characters: int
    close: Callable[[], Awaitable[None]]
    calls_s: dict[str, list[float]] = field(default_factory=dict)  # seconds of each call, by the tool's name

    async def reset(self, columns: Mapping[str, Any]) -> str:
        """Call `reset` of the environments with the columns of the data row; return their concatenated texts."""
        texts = [await self._ask(reset, columns) for reset in self.kit.resets]
        return "".join(text for text in texts if text is not None)

    async def reward(self) -> float | None:
        """Return the sum of the environments' `get_reward`; None if no environment has a reward."""
        rewards = [await self._ask(reward, {}) for reward in self.kit.rewards]
        return sum(rewards) if rewards else None

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool and return its result as valid UTF-8; errors and timeouts are returned as results."""
        began_s = asyncio.get_running_loop().time()
        result = await self._result(call)
        if call.name in self.kit.tools:
            self.calls_s.setdefault(call.name, []).append(asyncio.get_running_loop().time() - began_s)
        return replace(result, text=encodable(result.text))

    async def _result(self, call: ToolCall) -> ToolResult:
        if call.error:
            return ToolResult(f"Error: {call.error}", "raised")
        if not (tool := self.kit.tools.get(call.name)):
            return ToolResult(f"Error: there is no tool {call.name}"[: self.characters], "raised")
        try:
            async with tool.slots or nullcontext():  # the time limit excludes the wait for a slot
                value = await self._ask(tool, call.arguments)
        except ToolError as error:
            kind = "timeout" if isinstance(error, ToolTimeoutError) else "raised"
            return ToolResult(f"Error: {error}"[: self.characters], kind)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        left_out = len(text) - self.characters
        return ToolResult(f"{text[: self.characters]}... ({left_out} characters left out)" if left_out > 0 else text)

    async def _ask(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        given = {"name": tool.listed, "arguments": arguments} if tool.listed else arguments
        request = (tool.path, tool.method, given)
        return await self.kit.processes.call(tool.name, request, self.limit_s, self.environments.get(tool.path))


def load_tools(
    paths: Sequence[str],
    processes: int = PROCESSES,
    arguments: Mapping[str, Mapping[str, Any]] = {},
    variables: Sequence[str] = (),
) -> ToolKit:
    """Load functions and classes, get their JSON schemas, and check that a worker process can import them.

    `paths`: 'module:name' or 'file.py:name'; `processes`: maximum number of concurrent calls of functions; `arguments`:
    constructor arguments of classes, by path; `variables`: environment variables that the worker processes get.
    """
    if unknown := next((path for path in arguments if path not in paths), None):
        raise UserError(f"rollout.tool_args: {unknown!r} is not in {SETTING}{did_you_mean(unknown, paths)}")
    if missing := [name for name in variables if name not in os.environ]:
        raise UserError(f"rollout.tool_environment: the run has no variable {', '.join(missing)}: set it")
    tools = list[tuple[str, Tool]]()
    schemas = list[dict[str, Any]]()
    makers = dict[str, Mapping[str, Any]]()
    servers = dict[str, Tool]()  # ListedTools, by path
    for path in paths:
        label = f"{SETTING} {path!r}"
        loaded = load_attribute(path, label)
        if isinstance(loaded, type):
            makers[path] = arguments.get(path, {})
            slots = _slots(loaded, makers[path], label)
            methods = _methods(path, loaded, slots)
            if issubclass(loaded, ListedTools):
                servers[path] = Tool(loaded.__qualname__, path, "call", slots)
                methods = {name: tool for name, tool in methods.items() if name in OF_EPISODES}
            tools += methods.items()
            schemas += [_schema(getattr(loaded, name), label) for name in methods if name not in OF_EPISODES]
        elif path in arguments:
            raise UserError(f"rollout.tool_args: {path!r} is a function, whose arguments are the policy's")
        elif callable(loaded):
            tools.append((loaded.__name__, Tool(loaded.__qualname__, path)))
            schemas.append(_schema(loaded, label))
        else:
            raise UserError(f"{label}: a tool is a function or a class, not {type(loaded).__name__}")
    calls = ToolProcesses(tuple(paths), processes, makers, tuple(variables))
    listed = asyncio.run(calls.check(tuple(servers))) if paths else {}
    for path, server in servers.items():
        schemas += listed[path]
        names = [schema["function"]["name"] for schema in listed[path]]
        tools += [(name, replace(server, name=f"{server.name}.{name}", listed=name)) for name in names]
    names = [schema["function"]["name"] for schema in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{SETTING}: two tools have the name {twice}: rename one")
    return ToolKit(
        {name: tool for name, tool in tools if tool.method not in OF_EPISODES},
        resets=tuple(tool for _, tool in tools if tool.method == RESET),
        rewards=tuple(tool for _, tool in tools if tool.method == REWARD),
        schemas=tuple(schemas),
        processes=calls,
    )


def _slots(kind: type, arguments: Mapping[str, Any], label: str) -> asyncio.Semaphore | None:
    """Return the slots of BoundedTools; create an instance to check the arguments at startup."""
    with refuse_failures(f"{label}: no environment can be made of {dict(arguments)}", (Exception, SystemExit)):
        made = kind(**arguments)
    return asyncio.Semaphore(made.parallel) if isinstance(made, BoundedTools) else None


def _methods(path: str, kind: type, slots: asyncio.Semaphore | None) -> dict[str, Tool]:
    """Return the public methods of an environment class."""
    names = [name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")]
    return {name: Tool(f"{kind.__qualname__}.{name}", path, name, slots) for name in names}


def _schema(tool: Callable[..., Any], label: str) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        raise UserError(f"{label}: a tool needs type hints and a docstring with `Args:`: {one_line(error)}") from error
    return schema
