"""Tools of an episode: typed functions, or classes whose methods are tools, called in limited time (TRL's `tools`)."""

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from grpo_mp.episodes.protocol import ToolCall, ToolResult
from grpo_mp.errors import UserError, one_line
from grpo_mp.user_code import load_attribute, no_exit

SETTING = "rollout.tools"


@dataclass(frozen=True)
class ToolKit:
    """The tools that the settings name: functions, and classes, of which each episode gets an instance.

    Public methods of a class are tools, but `reset`, which is called with the columns of the data row at the start of
    an episode; text that it returns is put after the prompt (TRL's `environment_factory`).
    """

    functions: tuple[Callable[..., Any], ...] = ()
    classes: tuple[type, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()

    def open(self, limit_s: float, characters: int) -> "EpisodeTools":
        """Make the tools of one episode: `limit_s` bounds a call, `characters` its result."""
        environments = tuple(make() for make in self.classes)
        methods = [tool for environment in environments for tool in _methods(environment)]
        return EpisodeTools(
            {tool.__name__: tool for tool in (*self.functions, *methods)}, environments, limit_s, characters
        )


@dataclass(frozen=True)
class EpisodeTools:
    """The tools of one episode."""

    by_name: Mapping[str, Callable[..., Any]]
    environments: tuple[Any, ...]
    limit_s: float
    characters: int

    async def reset(self, columns: Mapping[str, Any]) -> str:
        """Begin the episode in its environments; return what they say."""
        resets = [environment.reset for environment in self.environments if hasattr(environment, "reset")]
        said = [await call_in_time(reset, columns, self.limit_s) for reset in resets]
        return "".join(text for text in said if text is not None)

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool; what it raises, and a call that takes too long, is told to the model."""
        if call.name not in self.by_name:
            return ToolResult(f"Error: there is no tool {call.name}", "raised")
        try:
            value = await call_in_time(self.by_name[call.name], call.arguments, self.limit_s)
            text = value if isinstance(value, str) else _as_text(value)
        except TimeoutError:
            return ToolResult(f"Error: {call.name} took longer than {self.limit_s:g} s", "timeout")
        except Exception as error:  # noqa: BLE001 - a tool may raise anything
            return ToolResult(f"Error: {type(error).__name__}: {one_line(error)}"[: self.characters], "raised")
        left_out = len(text) - self.characters
        return ToolResult(f"{text[: self.characters]}... ({left_out} characters left out)" if left_out > 0 else text)


async def call_in_time(function: Callable[..., Any], arguments: Mapping[str, Any], limit_s: float) -> Any:
    """Call a function or await a coroutine function. Raises TimeoutError after `limit_s`, and what it raises.

    A function runs in a daemon thread. A thread cannot be killed, so one that hangs is left behind.
    """
    if inspect.iscoroutinefunction(function):
        return await asyncio.wait_for(function(**arguments), limit_s)
    future: Future[Any] = Future()

    def run() -> None:
        try:
            with no_exit():
                future.set_result(function(**arguments))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}"))

    threading.Thread(target=run, name="tool", daemon=True).start()
    waiting: Awaitable[Any] = asyncio.wrap_future(future)
    done, _ = await asyncio.wait({asyncio.ensure_future(waiting)}, timeout=limit_s)
    if not done:
        raise TimeoutError
    return done.pop().result()


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
            schemas += [_schema(tool, label) for tool in _methods(loaded)]
        elif callable(loaded):
            functions.append(loaded)
            schemas.append(_schema(loaded, label))
        else:
            raise UserError(f"{label}: a tool is a function or a class, not {type(loaded).__name__}")
    names = [schema["function"]["name"] for schema in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{SETTING}: two tools have the name {twice}: rename one")
    return ToolKit(tuple(functions), tuple(classes), tuple(schemas))


def _methods(owner: Any) -> list[Callable[..., Any]]:
    members = inspect.getmembers(owner, callable)
    return [member for name, member in members if not name.startswith("_") and name != "reset"]


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
