"""Tools of an episode: typed functions, or classes whose methods are tools, called in limited time (TRL's `tools`)."""

import asyncio
import inspect
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
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
from grpo_mp.utils.user_code import (
    IMPORT_LIMIT_S,
    SelfCancelledError,
    load_attribute,
    no_exit,
    time_limit,
    without_exit,
)

LOGGER = logging.getLogger(__name__)
SETTING = "rollout.tools"
MOST_HANGING = 16
_Schemas = list[dict[str, Any]]


class ToolHangsError(ToolTimeoutError):
    """A tool is not called, because too many of its earlier calls still hang."""


@dataclass(frozen=True)
class ToolThreads:
    """Threads of a rank's tools. One that hangs cannot be ended: `MOST_HANGING` of each tool are left, no more."""

    hanging: Counter[str] = field(default_factory=Counter)  # by qualified name

    async def call(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        limit_s: float,
        slots: asyncio.Semaphore | None = None,
    ) -> Any:
        """Await a coroutine function, or call a function in a daemon thread.

        To wait for one of `slots` is no part of `limit_s`; a call holds it until it ends, also one that is left behind.
        Raises ToolTimeoutError after `limit_s`, ToolHangsError, and what the tool raises.
        """
        name, is_coroutine = _name_of(function), inspect.iscoroutinefunction(function)
        if self.hanging[name] >= MOST_HANGING:
            raise ToolHangsError(f"{name} is not called: {MOST_HANGING} of its calls still hang")
        async with AsyncExitStack() as opened:
            if slots:
                await opened.enter_async_context(slots)
            running = asyncio.ensure_future(
                without_exit(function(**arguments))
                if is_coroutine
                else asyncio.wrap_future(_in_thread(function, arguments))
            )
            opened.pop_all()  # the call itself frees the slot
            if slots:
                running.add_done_callback(lambda _: slots.release())
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            done, _ = await asyncio.wait({running}, timeout=limit_s)
        except asyncio.CancelledError:  # the episode ends: nobody waits for the call any more
            if is_coroutine:
                running.cancel()
            else:  # one that ends within its limit does not hang
                loop.call_at(began + limit_s, self._count_hanging, name, running)
            raise
        if not done:
            if is_coroutine:
                running.cancel()
            else:
                self._count_hanging(name, running)
            raise ToolTimeoutError(f"{name} took longer than {limit_s:g} s")
        if running.cancelled():
            raise SelfCancelledError("it cancelled its own task")
        return running.result()

    def _count_hanging(self, name: str, running: asyncio.Future[Any]) -> None:
        """Count a call in a thread that goes on past its limit until it ends."""
        if not running.done():
            self.hanging[name] += 1
            running.add_done_callback(lambda _: self.hanging.subtract([name]))

    async def environment(
        self, kind: "EnvironmentClass", limit_s: float, ending: AsyncExitStack
    ) -> tuple[tuple[Any, ...], Callable[[str], Any]]:
        """Make an environment; return it, and what gives its tools by their names."""
        instance = await self.call(kind.make, {}, limit_s)
        return (instance,), lambda name: getattr(instance, name)

    def tool(self, function: Callable[..., Any], path: str) -> Any:
        """Return a function as `call` takes it."""
        return function


@dataclass(frozen=True)
class RemoteTools:
    """Calls the tools of a rank in worker processes, as ToolThreads does in threads."""

    processes: ToolProcesses

    async def call(
        self, tool: RemoteTool, arguments: Mapping[str, Any], limit_s: float, slots: asyncio.Semaphore | None = None
    ) -> Any:
        """Call a tool in another process, see ToolProcesses.call; `limit_s` begins when one of `slots` is free."""
        async with slots or nullcontext():
            return await self.processes.call(tool, arguments, limit_s)

    async def environment(
        self, kind: "EnvironmentClass", limit_s: float, ending: AsyncExitStack
    ) -> tuple[tuple[Any, ...], Callable[[str], Any]]:
        """Make an environment in a process of its own, which `ending` sets free; nothing of it is here."""
        process = await self.processes.make(RemoteTool(kind.name, kind.path), limit_s)
        ending.push_async_callback(self.processes.drop, process, limit_s)
        return (), lambda name: RemoteTool(f"{kind.name}.{name}", kind.path, name, process)

    def tool(self, function: Callable[..., Any], path: str) -> Any:
        """Return a function as `call` takes it."""
        return RemoteTool(function.__qualname__, path)


@dataclass(frozen=True)
class EnvironmentClass:
    """A class of `rollout.tools`, or that a factory makes. `tools`: the names of its methods that are.

    `slots` and `timeout_s`: of BoundedTools.
    """

    path: str
    make: Callable[[], Any]
    kind: type
    tools: tuple[str, ...]
    resets: bool
    rewards: bool
    slots: asyncio.Semaphore | None = None
    timeout_s: float = 0.0

    @property
    def name(self) -> str:
        """Return the name of the class."""
        return self.kind.__qualname__


@dataclass(frozen=True)
class ToolKit:
    """The tools that the settings name: functions, and classes, of which each episode gets an instance.

    Public methods of a class are tools, but `reset`, which is called with the columns of the data row at the start of
    an episode; text that it returns is put after the prompt; and `get_reward`, called without arguments at its end
    (TRL's `environment_factory`).
    """

    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by path
    classes: tuple[EnvironmentClass, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()
    calls: ToolThreads | RemoteTools = field(default_factory=ToolThreads)
    by_environment: Mapping[str, "ToolKit"] = field(default_factory=dict)  # with the environment that a data row names

    async def open(self, limit_s: float, characters: int, where: Callable[[], str] = str) -> "EpisodeTools":
        """Make the tools of one episode, which `close` ends.

        `limit_s` bounds a call, `characters` its result; `where`: task and turn.
        """
        by_name = {function.__name__: self.calls.tool(function, path) for path, function in self.functions.items()}
        environments, resets, rewards = list[Any](), list[Any](), list[Any]()
        async with AsyncExitStack() as opened:
            for kind in self.classes:
                instances, of_name = await self.calls.environment(kind, limit_s, opened)
                environments += instances
                by_name |= {name: of_name(name) for name in kind.tools}
                resets += [of_name("reset")] if kind.resets else []
                rewards += [of_name("get_reward")] if kind.rewards else []
            close = opened.pop_all().aclose
        slots = {name: kind.slots for kind in self.classes for name in kind.tools if kind.slots}
        of_episode = (by_name, slots, tuple(environments), resets, rewards)
        return EpisodeTools(*of_episode, limit_s, characters, self.calls, where, close)

    def check(self, limit_s: float) -> None:
        """Raise UserError where a class's own limit of a call is no less than that of all tools."""
        for kind in (kind for kit in (self, *self.by_environment.values()) for kind in kit.classes):
            if kind.timeout_s >= limit_s:
                raise UserError(
                    f"rollout.tool_args {kind.path}: timeout_s={kind.timeout_s:g} is not below rollout.limits.tool_s="
                    f"{limit_s:g}, at which a call counts as hanging: lower the one or raise the other"
                )

    async def close(self) -> None:
        """End the processes that have no work."""
        if isinstance(self.calls, RemoteTools):
            await self.calls.processes.close()


@dataclass(frozen=True)
class EpisodeTools:
    """The tools of one episode."""

    by_name: Mapping[str, Any]
    slots: Mapping[str, asyncio.Semaphore]  # of the rank, by the names of tools that share some
    environments: tuple[Any, ...]  # of this process
    resets: Sequence[Any]
    rewards: Sequence[Any]
    limit_s: float
    characters: int
    calls: ToolThreads | RemoteTools
    where: Callable[[], str]
    close: Callable[[], Awaitable[None]]

    async def reset(self, columns: Mapping[str, Any]) -> str:
        """Begin the episode in its environments; return what they say."""
        said = [await self._call(reset, columns) for reset in self.resets]
        return "".join(text for text in said if text is not None)

    async def reward(self) -> float | None:
        """Return the sum of what the environments' `get_reward` say; None where none has one."""
        rewards = [await self._call(owner, {}) for owner in self.rewards]
        return sum(rewards) if rewards else None

    async def _call(self, tool: Any, arguments: Mapping[str, Any], slots: asyncio.Semaphore | None = None) -> Any:
        return await self.calls.call(tool, arguments, self.limit_s, slots)

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool; what it raises, and a call that takes too long, is told to the model, as text in UTF-8."""
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
            value = await self._call(self.by_name[call.name], call.arguments, self.slots.get(call.name))
            text = value if isinstance(value, str) else _as_text(value)
        except ToolTimeoutError as error:
            level = logging.INFO if isinstance(error, ToolHangsError) else logging.WARNING
            LOGGER.log(level, "%s: the tool %s (rollout.limits.tool_s)", self.where(), error)
            return ToolResult(f"Error: {error}", "timeout")
        except ToolDiedError as error:
            LOGGER.warning("%s: the tool %s", self.where(), error)
            return ToolResult(f"Error: {error}", "raised")
        except Exception as error:  # noqa: BLE001 - a tool may raise anything
            reason = str(error) if isinstance(error, ToolRaisedError) else f"{type(error).__name__}: {one_line(error)}"
            LOGGER.info("%s: the tool %s raised %s", self.where(), call.name, encodable(reason))
            return ToolResult(f"Error: {reason}"[: self.characters], "raised")
        left_out = len(text) - self.characters
        if left_out > 0:
            sentence = "%s: the tool %s returned %d characters: the policy is shown rollout.limits.tool_characters=%d"
            LOGGER.info(sentence, self.where(), call.name, len(text), self.characters)
        if isinstance(value, bytes) and "\ufffd" in text:
            LOGGER.info("%s: the tool %s returned bytes that are no UTF-8: they are replaced", self.where(), call.name)
        return ToolResult(f"{text[: self.characters]}... ({left_out} characters left out)" if left_out > 0 else text)


def _name_of(function: Callable[..., Any]) -> str:
    named: Any = function.func if isinstance(function, partial) else function
    name: str = named.__qualname__
    return name


def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            with no_exit():
                future.set_result(function(**arguments))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            # CancelledError would be taken for asyncio's own.
            is_plain = isinstance(error, Exception) and not isinstance(error, CancelledError)
            future.set_exception(error if is_plain else RuntimeError(f"it raised {error!r}"))

    threading.Thread(target=run, name="tool", daemon=True).start()
    return future


def load_tools(
    paths: Sequence[str],
    processes: int | None = None,
    arguments: Mapping[str, Mapping[str, Any]] = {},
    factory: str | Mapping[str, str] | None = None,
    variables: Sequence[str] = (),
) -> ToolKit:
    """Load functions and classes by 'module:name' or 'file.py:name', and make their schemas.

    `processes`: calls of functions at a time in processes of their own; None: tools run in threads of this one.
    `arguments`: of classes, by path; one instance is made here; `factory`: a path of what makes an environment, or one
    for each name; `variables`: of the run's environment, for processes. Raises UserError where one is not set, or a
    tool cannot be loaded, made, or started in a process, or has no type hints or docstring.
    """
    named = factory if isinstance(factory, Mapping) else {}
    factories = list(dict.fromkeys(named.values())) if named else [factory] if isinstance(factory, str) else []
    every = (*paths, *factories)
    if unknown := next((path for path in arguments if path not in every), None):
        raise UserError(f"rollout.tool_args: {unknown!r} is not in {SETTING}{did_you_mean(unknown, every)}")
    functions, kinds, schemas = dict[str, Callable[..., Any]](), dict[str, EnvironmentClass](), dict[str, _Schemas]()
    for path in every:
        label = f"rollout.environment_factory {path!r}" if path in factories else f"{SETTING} {path!r}"
        loaded = load_attribute(path, label)
        if isinstance(loaded, type) or path in factories:
            kinds[path] = _environment(path, loaded, arguments.get(path, {}), label)
            schemas[path] = [_schema(getattr(kinds[path].kind, name), label) for name in kinds[path].tools]
        elif path in arguments:
            raise UserError(f"rollout.tool_args: {path!r} is a function, whose arguments are the policy's")
        elif callable(loaded):
            functions[path], schemas[path] = loaded, [_schema(loaded, label)]
        else:
            raise UserError(f"{label}: a tool is a function or a class, not {type(loaded).__name__}")
    calls: ToolThreads | RemoteTools = ToolThreads()
    if processes and every:
        if missing := [name for name in variables if name not in os.environ]:
            raise UserError(f"rollout.tool_environment: the run has no variable {', '.join(missing)}: set it")
        makers = {path: arguments.get(path, {}) for path in kinds}
        calls = RemoteTools(ToolProcesses(every, processes, makers, tuple(variables)))
        asyncio.run(calls.processes.check())

    def kit(own: Sequence[str]) -> ToolKit:
        classes = tuple(kinds[path] for path in own if path in kinds)
        return ToolKit(functions, classes, _distinct([one for path in own for one in schemas[path]]), calls)

    kits = {name: kit((*paths, path)) for name, path in named.items()}
    return replace(kit(paths if named else every), by_environment=kits)


def _distinct(schemas: _Schemas) -> tuple[dict[str, Any], ...]:
    """Return the schemas of tools that an episode has. Raises UserError where two have one name."""
    names = [schema["function"]["name"] for schema in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{SETTING}: two tools have the name {twice}: rename one")
    return tuple(schemas)


def _environment(path: str, loaded: Callable[..., Any], arguments: Mapping[str, Any], label: str) -> EnvironmentClass:
    """Describe the environments that a class or a function makes, of which one is made here."""
    make = partial(loaded, **arguments)
    try:
        with no_exit(), time_limit(IMPORT_LIMIT_S, f"{label}: making an environment"):
            made = make()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{label}: no environment can be made of {dict(arguments)}: {reason}") from error
    kind = type(made)
    owns = (hasattr(kind, "reset"), hasattr(kind, "get_reward"))
    bounds = (asyncio.Semaphore(made.parallel), made.timeout_s) if isinstance(made, BoundedTools) else ()
    return EnvironmentClass(path, make, kind, tuple(_methods(kind)), *owns, *bounds)


def _methods(owner: type) -> list[str]:
    """Return the names of a class's tools: what an instance holds beside its methods is no tool."""
    members = inspect.getmembers(owner, inspect.isroutine)
    return [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]


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
