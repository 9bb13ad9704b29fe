"""Tools of an episode: typed functions or methods of classes, called in worker processes (TRL's `tools`)."""

import asyncio
import inspect
import json
import logging
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
from grpo_mp.utils.user_code import IMPORT_LIMIT_S, load_attribute, no_exit, time_limit

LOGGER = logging.getLogger(__name__)
SETTING = "rollout.tools"
PROCESSES = 16  # concurrent calls of functions on one rank
Schemas = list[dict[str, Any]]


@dataclass(frozen=True)
class EnvironmentClass:
    """A class of `rollout.tools`, or the class of what a factory makes. `tools`: names of its methods.

    `slots` and `timeout_s`: from BoundedTools.
    """

    path: str
    name: str
    tools: tuple[str, ...]
    resets: bool
    rewards: bool
    slots: asyncio.Semaphore | None = None
    timeout_s: float = 0.0


@dataclass(frozen=True)
class ToolKit:
    """The tools that the settings name: functions, and classes, of which each episode gets an instance.

    Public methods of a class are tools, except `reset`, which is called with the columns of the data row at the start
    of an episode and returns text that is appended to the prompt, and `get_reward`, which is called without arguments
    at the end of the episode (TRL's `environment_factory`).
    """

    functions: Mapping[str, RemoteTool] = field(default_factory=dict)  # by the name that the policy calls
    classes: tuple[EnvironmentClass, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()
    processes: ToolProcesses = field(default_factory=lambda: ToolProcesses((), PROCESSES, {}))
    by_environment: Mapping[str, "ToolKit"] = field(default_factory=dict)  # by the environment that a data row names

    async def open(self, limit_s: float, characters: int, where: Callable[[], str] = str) -> "EpisodeTools":
        """Make the tools of one episode; call `close` at its end.

        `limit_s` limits a call, `characters` its result; `where` names task and turn in the log.
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
            where=where,
            close=close,
        )

    def check(self, limit_s: float) -> None:
        """Raise UserError where a class's own time limit of a call is not below that of all tools."""
        for kind in (kind for kit in (self, *self.by_environment.values()) for kind in kit.classes):
            if kind.timeout_s >= limit_s:
                raise UserError(
                    f"rollout.tool_args {kind.path}: timeout_s={kind.timeout_s:g} is not below rollout.limits.tool_s="
                    f"{limit_s:g}, at which a call counts as hanging: lower the one or raise the other"
                )

    async def close(self) -> None:
        """End the idle processes."""
        await self.processes.close()


@dataclass(frozen=True)
class EpisodeTools:
    """The tools of one episode."""

    by_name: Mapping[str, RemoteTool]
    slots: Mapping[str, asyncio.Semaphore]  # of the rank, by tool
    resets: Sequence[RemoteTool]
    rewards: Sequence[RemoteTool]
    limit_s: float
    characters: int
    processes: ToolProcesses
    where: Callable[[], str]
    close: Callable[[], Awaitable[None]]

    async def reset(self, columns: Mapping[str, Any]) -> str:
        """Reset the environments; return their texts."""
        texts = [await self.processes.call(reset, columns, self.limit_s) for reset in self.resets]
        return "".join(text for text in texts if text is not None)

    async def reward(self) -> float | None:
        """Return the sum of the environments' `get_reward`; None where none has one."""
        rewards = [await self.processes.call(reward, {}, self.limit_s) for reward in self.rewards]
        return sum(rewards) if rewards else None

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool. Exceptions and timeouts are results, too; all text is valid UTF-8."""
        result = await self._result(call)
        return replace(result, text=encodable(result.text))

    async def _result(self, call: ToolCall) -> ToolResult:
        name = one_line(call.name, 100)  # which the model may have made up
        if call.error:
            LOGGER.info("%s: the call of %s cannot be read: %s", self.where(), name, call.error)
            return ToolResult(f"Error: {call.error}", "raised")
        if call.name not in self.by_name:
            LOGGER.info("%s: there is no tool %s", self.where(), name)
            return ToolResult(f"Error: there is no tool {call.name}"[: self.characters], "raised")
        try:
            async with self.slots.get(call.name) or nullcontext():  # waiting for a slot is not part of the limit
                value = await self.processes.call(self.by_name[call.name], call.arguments, self.limit_s)
        except ToolTimeoutError as error:
            LOGGER.warning("%s: the tool %s (rollout.limits.tool_s)", self.where(), error)
            return ToolResult(f"Error: {error}", "timeout")
        except ToolDiedError as error:
            LOGGER.warning("%s: the tool %s", self.where(), error)
            return ToolResult(f"Error: {error}", "raised")
        except ToolRaisedError as error:
            LOGGER.info("%s: the tool %s raised %s", self.where(), call.name, encodable(str(error)))
            return ToolResult(f"Error: {error}"[: self.characters], "raised")
        return self._shown(call.name, value)

    def _shown(self, name: str, value: Any) -> ToolResult:
        text = value if isinstance(value, str) else _as_text(value)
        left_out = len(text) - self.characters
        if left_out > 0:
            sentence = "%s: the tool %s returned %d characters: the policy is shown rollout.limits.tool_characters=%d"
            LOGGER.info(sentence, self.where(), name, len(text), self.characters)
        if isinstance(value, bytes) and "\ufffd" in text:
            LOGGER.info("%s: the tool %s returned bytes that are no UTF-8: they are replaced", self.where(), name)
        return ToolResult(f"{text[: self.characters]}... ({left_out} characters left out)" if left_out > 0 else text)


def load_tools(
    paths: Sequence[str],
    processes: int = PROCESSES,
    arguments: Mapping[str, Mapping[str, Any]] = {},
    factory: str | Mapping[str, str] | None = None,
    variables: Sequence[str] = (),
) -> ToolKit:
    """Load functions and classes by 'module:name' or 'file.py:name', make their schemas, and start one process.

    `processes`: concurrent calls of functions. `arguments`: of classes, by path; one instance is made here. `factory`:
    path of what makes an environment, or one for each name. `variables`: names of the run's environment variables that
    the processes get. Raises UserError where a tool cannot be loaded, made or started, or has no type hints or
    docstring.
    """
    named = factory if isinstance(factory, Mapping) else {}
    factories = list(dict.fromkeys(named.values())) if named else [factory] if isinstance(factory, str) else []
    every = (*paths, *factories)
    if unknown := next((path for path in arguments if path not in every), None):
        raise UserError(f"rollout.tool_args: {unknown!r} is not in {SETTING}{did_you_mean(unknown, every)}")
    functions, kinds, schemas = dict[str, RemoteTool](), dict[str, EnvironmentClass](), dict[str, Schemas]()
    for path in every:
        label = f"rollout.environment_factory {path!r}" if path in factories else f"{SETTING} {path!r}"
        loaded = load_attribute(path, label)
        if isinstance(loaded, type) or path in factories:
            kinds[path], schemas[path] = _environment(path, loaded, arguments.get(path, {}), label)
        elif path in arguments:
            raise UserError(f"rollout.tool_args: {path!r} is a function, whose arguments are the policy's")
        elif callable(loaded):
            functions[loaded.__name__] = RemoteTool(loaded.__qualname__, path)
            schemas[path] = [_schema(loaded, label)]
        else:
            raise UserError(f"{label}: a tool is a function or a class, not {type(loaded).__name__}")
    if missing := [name for name in variables if name not in os.environ]:
        raise UserError(f"rollout.tool_environment: the run has no variable {', '.join(missing)}: set it")
    makers = {path: arguments.get(path, {}) for path in kinds}
    calls = ToolProcesses(every, processes, makers, tuple(variables))

    def kit(own: Sequence[str]) -> ToolKit:
        classes = tuple(kinds[path] for path in own if path in kinds)
        return ToolKit(functions, classes, _distinct([one for path in own for one in schemas[path]]), calls)

    by_environment = {name: kit((*paths, path)) for name, path in named.items()}
    loaded_kit = replace(kit(paths if named else every), by_environment=by_environment)
    if every:
        asyncio.run(calls.check())
    return loaded_kit


def _distinct(schemas: Schemas) -> tuple[dict[str, Any], ...]:
    """Return the schemas. Raises UserError where two tools of an episode have one name."""
    names = [schema["function"]["name"] for schema in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{SETTING}: two tools have the name {twice}: rename one")
    return tuple(schemas)


def _environment(
    path: str, loaded: Callable[..., Any], arguments: Mapping[str, Any], label: str
) -> tuple[EnvironmentClass, Schemas]:
    """Describe the environments of a class or factory by one instance, which is made here."""
    try:
        with no_exit(), time_limit(IMPORT_LIMIT_S, f"{label}: making an environment"):
            made = loaded(**arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{label}: no environment can be made of {dict(arguments)}: {reason}") from error
    kind = type(made)
    members = inspect.getmembers(kind, inspect.isroutine)  # of the class: attributes of an instance are no tools
    names = [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]
    owns = (hasattr(kind, "reset"), hasattr(kind, "get_reward"))
    bounds = (asyncio.Semaphore(made.parallel), made.timeout_s) if isinstance(made, BoundedTools) else ()
    schemas = [_schema(getattr(kind, name), label) for name in names]
    return EnvironmentClass(path, kind.__qualname__, tuple(names), *owns, *bounds), schemas


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
