"""Tests that are written in Python: what runs of them, and whether they can fail."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
FAILING_CALLS = ("raises", "fail", "exit", "_exit", "quit")  # calls that fail a test, beside assert...()
RUNNERS = ("unittest", "pytest")  # their main() is not called: harness.py runs the tests that they would find
CAPTURING = re.compile(r"(.*\.)?(redirect_std(out|err)|mock\.patch(\..+)?)|patch(\..+)?")  # only the tests' own process


def read_script(text: str, entry_point: str | None) -> str:
    """Return the tests as harness.py runs them; "" where the text has no statements.

    `entry_point`: expression for the function of the program that `check(candidate)` of the tests is given.

    harness.py calls functions and classes that pytest and unittest would find. Raises ValueError, with the reason,
    for a text that is not Python, that asserts nothing, or that asks for what its process does not have.
    """
    tree = _parse(text)
    if not tree.body:
        return ""
    body = [_asserted(node) for node in tree.body if not _starts_runner(node)]
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    collected = [node for node in _collected(body) if not isinstance(node, ast.AsyncFunctionDef)]
    roots = [*body, *_bodies(collected)]
    if entry_point and "check" in functions and "check" not in _called(_executed(roots, functions)):
        _parse(entry_point)
        body += ast.parse(f"check(_find_({entry_point!r}))").body
    if not _can_fail([*body, *_bodies(collected)], functions):
        body = [part for node in body for part in (node.body if _is_main_block(node) else [node])]
    executed = [*_executed([*body, *_bodies(collected)], functions)]
    if not any(map(_fails, executed)):
        lacks = ": check(candidate) needs a column entry_point" if "check" in functions and not entry_point else ""
        raise ValueError(f"asserts nothing when it runs{lacks}")
    _check_arguments(collected, functions, _called(executed))
    _check_names(tree)
    return text if body == tree.body else ast.unparse(ast.Module(body, []))


def is_code(text: str) -> bool:
    """Return whether a text is Python that imports or defines something."""
    try:
        body = _parse(text).body
    except ValueError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) for node in body)


def defines(text: str, name: str) -> bool:
    """Return whether Python code defines a function or class of this name at its top level."""
    return any(isinstance(node, Function | ast.ClassDef) and node.name == name for node in _parse(text).body)


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(
            f"is not Python ({error.msg} in line {error.lineno}: {(error.text or '').strip()[:60]!r})"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:  # a null character, or nested too deep
        raise ValueError(f"is not Python that can be read ({error or type(error).__name__})") from error


def _asserted(node: ast.stmt) -> ast.stmt:
    """Return an assertion in the place of a bare comparison."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare | ast.BoolOp):
        return ast.copy_location(ast.Assert(node.value), node)
    return node


def _starts_runner(node: ast.stmt) -> bool:
    """Return whether a statement calls unittest.main() or pytest.main(), or is the main block that does."""
    if not (isinstance(node, ast.Expr) or _is_main_block(node)):
        return False
    functions = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return any(
        isinstance(one, ast.Attribute)
        and one.attr == "main"
        and isinstance(one.value, ast.Name)
        and one.value.id in RUNNERS
        for one in functions
    )


def _is_main_block(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _collected(body: Iterable[ast.stmt]) -> Iterator[Function]:
    """Yield the functions and methods that pytest and unittest would call."""
    for node in body:
        if isinstance(node, Function) and node.name.startswith("test"):
            yield node
        elif isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_test_case(node)):
            yield from (one for one in node.body if isinstance(one, Function) and one.name.startswith("test"))


def _is_test_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in node.bases)


def _bodies(functions: Iterable[Function]) -> Iterator[ast.stmt]:
    return (statement for function in functions for statement in function.body)


def _executed(roots: Iterable[ast.AST], functions: dict[str, Function]) -> Iterator[ast.AST]:
    """Yield the nodes that run: not the bodies of functions that nothing calls, nor of the main block."""
    waiting, entered = [*roots], set[str]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.Lambda) or (isinstance(node, ast.stmt) and _is_main_block(node)):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)
        name = _called_name(node)
        if name in functions and name not in entered:
            entered.add(name)
            waiting += functions[name].body


def _can_fail(roots: Iterable[ast.AST], functions: dict[str, Function]) -> bool:
    return any(map(_fails, _executed(roots, functions)))


def _fails(node: ast.AST) -> bool:
    """Return whether a node can fail a test."""
    if isinstance(node, ast.Assert):
        is_false = isinstance(node.test, ast.Constant) and not node.test.value
        return is_false or any(isinstance(part, ast.Name) for part in ast.walk(node.test))
    name = _called_name(node)
    return isinstance(node, ast.Raise) or name.startswith("assert") or name in FAILING_CALLS


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    return set(map(_called_name, nodes))


def _called_name(node: ast.AST) -> str:
    """Return the name of the function or method that a node calls; "" for another node."""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _check_arguments(collected: Iterable[Function], functions: dict[str, Function], called: set[str]) -> None:
    """Raise ValueError for a test that needs an argument which nothing gives it."""
    for function in collected:
        if function.name in called:
            continue
        given = {"self", *re.findall(r"\w+", " ".join(_decorators(function, "parametrize")))}
        required = function.args.args[: len(function.args.args) - len(function.args.defaults)]
        for name in (one.arg for one in required if one.arg not in given):
            if not (name in functions and _decorators(functions[name], "fixture")):
                raise ValueError(f"has {function.name}({name}), and no fixture or parameter {name}")


def _decorators(function: Function, name: str) -> list[str]:
    return [text for text in map(ast.unparse, function.decorator_list) if name in text]


def _check_names(tree: ast.Module) -> None:
    """Raise ValueError for a module that is not installed, and for what would have to change the program's process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        for module in modules:
            if not _is_installed(module.partition(".")[0]):
                raise ValueError(f"imports {module or '.'}, which is not installed; the program is the module solution")
        if isinstance(node, ast.Call) and CAPTURING.fullmatch(name := ast.unparse(node.func)):
            raise ValueError(f"calls {name}, and the program runs in another process: test what it returns")


@cache
def _is_installed(name: str) -> bool:
    return name == "solution" or name in sys.stdlib_module_names or bool(name and find_spec(name))
