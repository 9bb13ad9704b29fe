"""Tools of an episode: typed functions, or classes whose methods are tools, called in limited time (TRL's `tools`)."""

import asyncio
import inspect
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import get_json_schema

from grpo_mp.episodes.protocol import ToolCall, ToolResult
from grpo_mp.errors import UserError, one_line
from grpo_mp.user_code import load_attribute, no_exit, without_exit

LOGGER = logging.getLogger(__name__)
SETTING = "rollout.tools"
MOST_HANGING = 16


class ToolTimeoutError(Exception):
    """A tool took longer than `rollout.limits.tool_s`."""


class ToolHangsError(ToolTimeoutError):
    """A tool is not called, because too many of its earlier calls still hang."""


@dataclass(frozen=True)
class ToolThreads:
    """Threads of a rank's tools. One that hangs cannot be ended: `MOST_HANGING` of each tool are left, no more."""

    hanging: Counter[str] = field(default_factory=Counter)  # by qualified name

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], limit_s: float) -> Any:
        """Await a coroutine function, or call a function in a daemon thread.

        Raises ToolTimeoutError after `limit_s`, ToolHangsError, and what the tool raises.
        """
        name, is_coroutine = function.__qualname__, inspect.iscoroutinefunction(function)
        if self.hanging[name] >= MOST_HANGING:
            raise ToolHangsError(f"{name} is not called: {MOST_HANGING} of its calls still hang")
        running = asyncio.ensure_future(
            without_exit(function(**arguments))
            if is_coroutine
            else asyncio.wrap_future(_in_thread(function, arguments))
        )
        done, _ = await asyncio.wait({running}, timeout=limit_s)
        if done:
            return running.result()
        if is_coroutine:
            running.cancel()
        else:
            self.hanging[name] += 1
            running.add_done_callback(lambda _: self.hanging.subtract([name]))
        raise ToolTimeoutError(f"{name} took longer than {limit_s:g} s")


@dataclass(frozen=True)
class ToolKit:
    """The tools that the settings name: functions, and classes, of which each episode gets an instance.

    Public methods of a class are tools, but `reset`, which is called with the columns of the data row at the start of
    an episode; text that it returns is put after the prompt; and `get_reward`, called without arguments at its end
    (TRL's `environment_factory`).
    """

    functions: tuple[Callable[..., Any], ...] = ()
    classes: tuple[type, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()
    threads: ToolThreads = field(default_factory=ToolThreads)

    async def open(self, limit_s: float, characters: int, where: Callable[[], str] = str) -> "EpisodeTools":
        """Make the tools of one episode: `limit_s` bounds a call, `characters` its result; `where`: task and turn."""
        environments = tuple([await self.threads.call(make, {}, limit_s) for make in self.classes])
        methods = [getattr(environment, name) for environment in environments for name in _methods(type(environment))]
        return EpisodeTools(
            {tool.__name__: tool for tool in (*self.functions, *methods)},
            environments,
            limit_s,
            characters,
            self.threads,
            where,
        )


@dataclass(frozen=True)
class EpisodeTools:
    """The tools of one episode."""

    by_name: Mapping[str, Callable[..., Any]]
    environments: tuple[Any, ...]
    limit_s: float
    characters: int
    threads: ToolThreads
    where: Callable[[], str]

    async def reset(self, columns: Mapping[str, Any]) -> str:
        """Begin the episode in its environments; return what they say."""
        resets = [environment.reset for environment in self.environments if hasattr(environment, "reset")]
        said = [await self.threads.call(reset, columns, self.limit_s) for reset in resets]
        return "".join(text for text in said if text is not None)

    async def reward(self) -> float | None:
        """Return the sum of what the environments' `get_reward` say; None where none has one."""
        owners = [environment.get_reward for environment in self.environments if hasattr(environment, "get_reward")]
        rewards = [await self.threads.call(owner, {}, self.limit_s) for owner in owners]
        return sum(rewards) if rewards else None

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool; what it raises, and a call that takes too long, is told to the model."""
        if call.error:
            LOGGER.info("%s: the call of %s cannot be read: %s", self.where(), call.name, call.error)
            return ToolResult(f"Error: {call.error}", "raised")
        if call.name not in self.by_name:
            return ToolResult(f"Error: there is no tool {call.name}", "raised")
        try:
            value = await self.threads.call(self.by_name[call.name], call.arguments, self.limit_s)
            text = value if isinstance(value, str) else _as_text(value)
        except ToolTimeoutError as error:
            level = logging.INFO if isinstance(error, ToolHangsError) else logging.WARNING
            LOGGER.log(level, "%s: the tool %s (rollout.limits.tool_s)", self.where(), error)
            return ToolResult(f"Error: {error}", "timeout")
        except Exception as error:  # noqa: BLE001 - a tool may raise anything
            reason = f"{type(error).__name__}: {one_line(error)}"
            LOGGER.info("%s: the tool %s raised %s", self.where(), call.name, reason)
            return ToolResult(f"Error: {reason}"[: self.characters], "raised")
        left_out = len(text) - self.characters
        if left_out > 0:
            sentence = "%s: the tool %s returned %d characters: the policy is shown rollout.limits.tool_characters=%d"
            LOGGER.info(sentence, self.where(), call.name, len(text), self.characters)
        if isinstance(value, bytes) and "\ufffd" in text:
            LOGGER.info("%s: the tool %s returned bytes that are no UTF-8: they are replaced", self.where(), call.name)
        return ToolResult(f"{text[: self.characters]}... ({left_out} characters left out)" if left_out > 0 else text)


def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            with no_exit():
                future.set_result(function(**arguments))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}"))

    threading.Thread(target=run, name="tool", daemon=True).start()
    return future


def load_tools(paths: Sequence[str]) -> ToolKit:
    """Load functions and classes by 'module:name' or 'file.py:name', and make their schemas.

    Raises UserError where one cannot be loaded, or has no type hints or docstring.
    """
    functions, classes, schemas = list[Callable[..., Any]](), list[type](), list[dict[str, Any]]()
    for path in paths:
        label = f"{SETTING} {path!r}"
        loaded = load_attribute(path, label)
        if isinstance(loaded, type):
            classes.append(loaded)
            schemas += [_schema(getattr(loaded, name), label) for name in _methods(loaded)]
        elif callable(loaded):
            functions.append(loaded)
            schemas.append(_schema(loaded, label))
        else:
            raise UserError(f"{label}: a tool is a function or a class, not {type(loaded).__name__}")
    names = [schema["function"]["name"] for schema in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{SETTING}: two tools have the name {twice}: rename one")
    return ToolKit(tuple(functions), tuple(classes), tuple(schemas))


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
