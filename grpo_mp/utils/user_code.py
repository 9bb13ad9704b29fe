"""Load users' Python code by 'module:attribute' or 'path/file.py:attribute'."""

import importlib.util
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from grpo_mp.utils.errors import UserError, did_you_mean, one_line
from grpo_mp.utils.files import file_digest
from grpo_mp.utils.reading import check_regular

T = TypeVar("T")
PATH_FORMAT = "write module:function or path/file.py:function"
PYTHON_FILE = re.compile(r"(.+\.py)(:\w+)?")


async def without_exit(work: Coroutine[Any, Any, T]) -> T:
    """Await a user's coroutine. A SystemExit, which would end the event loop, becomes a RuntimeError."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"it raised {error!r}: return, or raise an error") from error


@cache
def _ignore_alarms_in_threads() -> None:
    # math-verify limits its time with SIGALRM, which Python allows in the main thread only. Rewards run in other
    # threads, where `reward.timeout_s` limits them.
    for name, ignored in {"signal": signal.SIG_DFL, "alarm": 0, "setitimer": (0.0, 0.0)}.items():
        setattr(signal, name, partial(_call_in_main_thread, getattr(signal, name), ignored))


def _call_in_main_thread(function: Callable[..., Any], ignored: Any, *arguments: Any) -> Any:
    is_main = threading.current_thread() is threading.main_thread()
    sets_handler = function.__name__ == "signal" and arguments[0] != signal.SIGALRM
    return function(*arguments) if is_main or sets_handler else ignored


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
    _ignore_alarms_in_threads()
    try:
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
