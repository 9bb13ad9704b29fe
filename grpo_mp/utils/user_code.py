"""Load users' Python code by 'module:attribute' or 'path/file.py:attribute', and keep it from ending the process."""

import asyncio
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from grpo_mp.utils.errors import UserError, did_you_mean, one_line
from grpo_mp.utils.files import file_digest
from grpo_mp.utils.reading import check_regular
from grpo_mp.utils.thread_alarms import cancel_alarm, guarded, install_alarms, is_guarded

T = TypeVar("T")
PATH_FORMAT = "write module:function or path/file.py:function"
PYTHON_FILE = re.compile(r"(.+\.py)(:\w+)?")


class ExitCallError(Exception):
    """User code called exit or os._exit, which would have ended the rank without a message."""


class SelfCancelledError(Exception):
    """A user's coroutine raised CancelledError without being cancelled, which would have cancelled its caller."""


_process_exit = os._exit


@contextmanager
def no_exit() -> Iterator[None]:
    """Make os._exit raise ExitCallError in this context (thread or asyncio task), and emulate SIGALRM in it.

    In forked children, which must end with os._exit, the function keeps its meaning.
    """
    os._exit = _exit_or_raise
    install_alarms()
    before = guarded.get()
    guarded.set(os.getpid())
    try:
        yield
    finally:
        if before is None:
            cancel_alarm()
        # ContextVar.reset would fail: a coroutine that is garbage-collected is closed in another context.
        guarded.set(before)


def _exit_or_raise(status: int) -> NoReturn:
    if is_guarded():
        raise ExitCallError(f"it called os._exit({status}): return, or raise an error")
    _process_exit(status)


async def without_exit(work: Coroutine[Any, Any, T]) -> T:
    """Await a user's coroutine, converting exceptions that would end the event loop or the rank.

    SystemExit and os._exit become ExitCallError. A CancelledError becomes SelfCancelledError, unless the current task
    is being cancelled.
    """
    try:
        with no_exit():
            return await work
    except SystemExit as error:
        raise ExitCallError(f"it raised {error!r}: return, or raise an error") from error
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        raise SelfCancelledError("it raised CancelledError, and nobody had cancelled it") from error


def is_path(name: str) -> bool:
    """Return whether a name has the form 'module:attribute' or 'file.py:attribute'."""
    source, _, attribute = name.rpartition(":")
    return bool(source and attribute)


def file_digests(tree: Any) -> dict[str, str]:
    """Return the checksum of each Python file that settings name in keys, values or words of a command, by path."""
    return {name: file_digest(Path(name)) for name in sorted(set(_python_files(tree)))}


def _python_files(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        yield from _python_files([*tree.keys(), *tree.values()])
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _python_files(part)
    elif isinstance(tree, str):
        named = map(PYTHON_FILE.fullmatch, (tree, *tree.split()))
        yield from (match[1] for match in named if match and os.path.isfile(match[1]))


def load_attribute(path: str, label: str) -> Any:
    """Return the attribute that `path` names, importing its module or file. A file is executed once in a process.

    `label`: the setting that error messages begin with.
    """
    source, _, attribute = path.rpartition(":")
    if not is_path(path):
        raise UserError(f"{label}: {PATH_FORMAT}")
    try:
        with no_exit():
            module = _load_file(Path(source), label) if source.endswith(".py") else import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = one_line(f"{type(error).__name__}: {error}", None).removesuffix(":")
        raise UserError(f"{label}: importing {source} failed: {reason}") from error
    if attribute not in vars(module):
        raise UserError(f"{label}: {source} has no {attribute}{did_you_mean(attribute, vars(module))}")
    return vars(module)[attribute]


def _load_file(path: Path, label: str) -> ModuleType:
    if not path.exists():
        raise UserError(f"{label}: no such file: {path}")
    check_regular(path)
    module_name = f"grpo_mp_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if module_name in sys.modules:  # relative and absolute paths of a file share its module
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{label}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # at the end, so that installed modules take precedence
    sys.modules[module_name] = module  # dataclasses and pickle look up the module of a class here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
