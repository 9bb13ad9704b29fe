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

from grpo_mp.rollout.protocol import BoundedTools, ToolCall, ToolResult
from grpo_mp.rollout.tool_processes import (
    RemoteTool,
    ToolDiedError,
    ToolProcesses,
    ToolRaisedError,
    ToolTimeoutError,
)
from grpo_mp.utils.errors import UserError, did_you_mean, one_line
from grpo_mp.utils.files import encodable
from grpo_mp.utils.user_code import load_attribute

SETTING = "rollout.tools"
PROCESSES = 16  # maximum number of concurrent calls of functions on one rank


@dataclass(frozen=True)
class EnvironmentClass:
    """A class in `rollout.tools`.

    `tools`: names of its public methods; `resets`, `rewards`: whether it has `reset` and `get_reward`; `slots`: limits
    concurrent calls of BoundedTools.
    """

    path: str
    name: str
    tools: tuple[str, ...]
    resets: bool
    rewards: bool
    slots: asyncio.Semaphore | None = None


@dataclass(frozen=True)
class ToolKit:
    """The tools in the settings: functions, and environment classes, of which each episode gets an instance.

    The public methods of a class are tools, with two exceptions (as in TRL's `environment_factory`). `reset` is called
    with the columns of the data row at the start of an episode and returns text to append to the prompt. `get_reward`
    is called without arguments at the end of the episode.
    """

    functions: Mapping[str, RemoteTool] = field(default_factory=dict)  # by tool name
    classes: tuple[EnvironmentClass, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()
    processes: ToolProcesses = field(default_factory=lambda: ToolProcesses((), PROCESSES, {}))

    async def open(self, limit_s: float, characters: int) -> "EpisodeTools":
        """Create the environments of one episode and return its tools; the caller must call `close` at the end.

        `limit_s`: time limit of a call [s]; `characters`: maximum length of a result.
        """
        by_name = dict(self.functions)
        resets, rewards = list[RemoteTool](), list[RemoteTool]()
        async with AsyncExitStack() as opened:
            for kind in self.classes:
                process = await self.processes.make(RemoteTool(kind.name, kind.path), limit_s)
                opened.push_async_callback(self.processes.drop, process, limit_s)

                def method(name: str, kind: EnvironmentClass = kind, process: Any = process) -> RemoteTool:
                    return RemoteTool(f"{kind.name}.{name}", kind.path, name, process)

                by_name |= {name: method(name) for name in kind.tools}
                resets += [method("reset")] if kind.resets else []
                rewards += [method("get_reward")] if kind.rewards else []
            close = opened.pop_all().aclose
        slots = {name: kind.slots for kind in self.classes for name in kind.tools if kind.slots}
        return EpisodeTools(
            by_name,
            slots,
            resets=resets,
            rewards=rewards,
            limit_s=limit_s,
            characters=characters,
            processes=self.processes,
            close=close,
        )

    async def close(self) -> None:
        await self.processes.close()


@dataclass(frozen=True)
class EpisodeTools:
    """The tools and environments of one episode."""

    by_name: Mapping[str, RemoteTool]
    slots: Mapping[str, asyncio.Semaphore]  # by tool name, shared by all episodes of the rank
    resets: Sequence[RemoteTool]
    rewards: Sequence[RemoteTool]
    limit_s: float
    characters: int
    processes: ToolProcesses
    close: Callable[[], Awaitable[None]]

    async def reset(self, columns: Mapping[str, Any]) -> str:
        """Call `reset` of the environments with the columns of the data row; return their concatenated texts."""
        texts = [await self.processes.call(reset, columns, self.limit_s) for reset in self.resets]
        return "".join(text for text in texts if text is not None)

    async def reward(self) -> float | None:
        """Return the sum of the environments' `get_reward`; None if no environment has a reward."""
        rewards = [await self.processes.call(reward, {}, self.limit_s) for reward in self.rewards]
        return sum(rewards) if rewards else None

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool and return its result as valid UTF-8; errors and timeouts are returned as results."""
        result = await self._result(call)
        return replace(result, text=encodable(result.text))

    async def _result(self, call: ToolCall) -> ToolResult:
        if call.error:
            return ToolResult(f"Error: {call.error}", "raised")
        if call.name not in self.by_name:
            return ToolResult(f"Error: there is no tool {call.name}"[: self.characters], "raised")
        try:
            async with self.slots.get(call.name) or nullcontext():  # the time limit excludes the wait for a slot
                value = await self.processes.call(self.by_name[call.name], call.arguments, self.limit_s)
        except ToolTimeoutError as error:
            return ToolResult(f"Error: {error}", "timeout")
        except (ToolDiedError, ToolRaisedError) as error:
            return ToolResult(f"Error: {error}"[: self.characters], "raised")
        text = value if isinstance(value, str) else _as_text(value)
        left_out = len(text) - self.characters
        return ToolResult(f"{text[: self.characters]}... ({left_out} characters left out)" if left_out > 0 else text)


def load_tools(
    paths: Sequence[str],
    processes: int = PROCESSES,
    arguments: Mapping[str, Mapping[str, Any]] = {},
    variables: Sequence[str] = (),
) -> ToolKit:
    """Load functions and classes, create their JSON schemas, and check that a worker process can import them.

    `paths`: 'module:name' or 'file.py:name'; `processes`: maximum number of concurrent calls of functions; `arguments`:
    constructor arguments of classes, by path; `variables`: environment variables that the worker processes get.
    """
    if unknown := next((path for path in arguments if path not in paths), None):
        raise UserError(f"rollout.tool_args: {unknown!r} is not in {SETTING}{did_you_mean(unknown, paths)}")
    if missing := [name for name in variables if name not in os.environ]:
        raise UserError(f"rollout.tool_environment: the run has no variable {', '.join(missing)}: set it")
    functions = dict[str, RemoteTool]()
    classes = dict[str, EnvironmentClass]()
    schemas = list[dict[str, Any]]()
    for path in paths:
        label = f"{SETTING} {path!r}"
        loaded = load_attribute(path, label)
        if isinstance(loaded, type):
            classes[path] = _environment_class(path, loaded, arguments.get(path, {}), label)
            schemas += [_schema(getattr(loaded, name), label) for name in classes[path].tools]
        elif path in arguments:
            raise UserError(f"rollout.tool_args: {path!r} is a function, whose arguments are the policy's")
        elif callable(loaded):
            functions[loaded.__name__] = RemoteTool(loaded.__qualname__, path)
            schemas.append(_schema(loaded, label))
        else:
            raise UserError(f"{label}: a tool is a function or a class, not {type(loaded).__name__}")
    names = [schema["function"]["name"] for schema in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{SETTING}: two tools have the name {twice}: rename one")
    makers = {path: arguments.get(path, {}) for path in classes}
    calls = ToolProcesses(tuple(paths), processes, makers, tuple(variables))
    if paths:
        asyncio.run(calls.check())
    return ToolKit(functions, tuple(classes.values()), tuple(schemas), calls)


def _environment_class(path: str, kind: type, arguments: Mapping[str, Any], label: str) -> EnvironmentClass:
    """Return the description of an environment class; create an instance to check the arguments at startup."""
    try:
        made = kind(**arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{label}: no environment can be made of {dict(arguments)}: {reason}") from error
    members = inspect.getmembers(kind, inspect.isroutine)
    names = [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]
    return EnvironmentClass(
        path,
        kind.__qualname__,
        tools=tuple(names),
        resets=hasattr(kind, "reset"),
        rewards=hasattr(kind, "get_reward"),
        slots=asyncio.Semaphore(made.parallel) if isinstance(made, BoundedTools) else None,
    )


def _schema(tool: Callable[..., Any], label: str) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        reason = one_line(error)
        raise UserError(f"{label}: a tool needs type hints and a docstring with `Args:`: {reason}") from error
    return schema


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return json.dumps(value, ensure_ascii=False, default=str)
