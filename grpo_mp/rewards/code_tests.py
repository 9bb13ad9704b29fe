"""Parse the unit tests of a data row, in the formats of published data sets, into `RowTests`."""

import ast
import base64
import json
import pickletools
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from grpo_mp.utils.errors import did_you_mean
from grpo_mp.utils.reading import has_column, read_column, shorten

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Keys under which a dictionary holds the tests.
HOLDERS = ("ground_truth", "test_cases", "tests", "test_list", "test_code", "test", "functional", "assert_case")
PACKED = "eJ"  # the beginning of zlib data in base64
BEGINNINGS = ("import_prefix", "prompt")  # keys of the code that precedes the function of entry_point
ENTRY_POINTS = ("fn_name", "func_name", "function_name", "entry_point")
FUNCTIONAL = ("functional", "function_call", "call_based")  # test types that call a function
STDIN = ("stdin", "stdin_stdout", "standard_input")
FORMS = "give Python tests, a list of them, {inputs, outputs}, or a list of {input, output}"
NEEDS_PYTEST = re.compile(r"@pytest\.(?:fixture|mark\.parametrize)\b")
RUNNERS = ("unittest.main", "pytest.main")  # removed: program_tests.py runs the tests that they would collect
# Imports that graders of contest programs provide; the last line restores builtins that math replaces, such as pow.
CONTEST_IMPORTS = (
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import *\nfrom typing import *\nfrom builtins import *\n"
)


@dataclass(frozen=True)
class CodeTest:
    """One test: a Python script that calls the program, or a stdin with the expected stdout.

    `expected`: for each `_call_` of the script, the accepted return values.
    """

    script: str | None = None
    expected: tuple[tuple[Any, ...], ...] = ()
    stdin: str = ""
    stdout: str = ""


@dataclass(frozen=True)
class RowTests:
    """Tests of a row, and Python code that runs before the program. Without tests the row is not scored."""

    cases: tuple[CodeTest, ...] = ()
    setup: str = ""


def read_tests(columns: Mapping[str, Any], column: str, partial: bool = False) -> RowTests:
    """Read the tests of a row from a column, given by its name or by a path such as reward_model.ground_truth.

    partial: keep Python tests separate, which otherwise run in one process. Raises ValueError if the column is missing,
    has no tests in a known format.
    """
    if not has_column(columns, column):
        known = shorten(", ".join(map(str, columns)), 300) or "none"
        raise ValueError(
            f"no column {column}{did_you_mean(column, columns)}, the row has: {known}: "
            "set reward.code.tests to the column of the tests"
        )
    value, context = _decoded(read_column(columns, column)), dict(columns)
    try:
        while isinstance(value, Mapping) and not {"input", "inputs"} & value.keys():
            if (holder := next((key for key in HOLDERS if key in value), None)) is None:
                break
            context |= value
            value = _decoded(value[holder])
        items = list(map(_decoded, value)) if isinstance(value, list | tuple) else [value]
        if all(item is None or (isinstance(item, str) and not item.strip()) for item in items):
            return RowTests()
        if all(isinstance(item, str) for item in items):
            return _python_tests(items, context, partial)
        if all(isinstance(item, Mapping) for item in items):
            pairs = [pair for item in items for pair in _pairs(item, many=item is value)]
            return _pair_tests(pairs, context, partial)
    except ValueError as error:
        raise ValueError(f"column {column} {error}") from error
    raise ValueError(f"column {column} holds no tests, but {shorten(repr(value))}: {FORMS}")


def _decoded(value: Any) -> Any:
    """Parse a text that holds a list or dictionary, as JSON or as a Python literal; return other values unchanged."""
    if isinstance(value, str) and value.startswith(PACKED):
        value = _unpacked(value)
    if not (isinstance(value, str) and value.lstrip()[:1] in ("[", "{")):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list | dict):
            return found
    return value


def _unpacked(text: str) -> str:
    """Return the JSON text of LiveCodeBench's private tests, which are a pickled string in zlib in base64.

    The pickle is scanned for its first string and never executed.
    """
    try:
        opcodes = pickletools.genops(zlib.decompress(base64.b64decode(text, validate=True)))
        return next((argument for _, argument, _ in opcodes if isinstance(argument, str)), text)
    except (ValueError, zlib.error):
        return text


# -- tests in Python -----------------------------------------------------------------------------------------


def _python_tests(texts: Sequence[str], context: Mapping[str, Any], partial: bool) -> RowTests:
    entry_point = _entry_point(context, ENTRY_POINTS)
    setup, begin = "", _begin(context)
    beginnings = (context.get(key) for key in BEGINNINGS) if entry_point else ()
    if entry_point and (setup := next((text for text in beginnings if isinstance(text, str) and _is_code(text)), "")):
        name = entry_point.partition("(")[0].partition(".")[0]
        is_defined = re.search(rf"^(?:async )?(?:def|class) {re.escape(name)}\b", setup, re.MULTILINE)
        begin = f"{setup}\n{f'del {name}' if is_defined else ''}\n{begin}"
    texts = [text for text in texts if text.strip()]
    units = texts if partial else ["\n".join(texts)]
    scripts = [_read_script(unit, entry_point) for unit in units]
    return RowTests(tuple(CodeTest(f"{begin}\n{script}") for script in scripts if script), setup)


def _begin(context: Mapping[str, Any]) -> str:
    """Return the setup code of the tests: the columns test_imports and test_setup_code."""
    parts = [context.get("test_imports"), context.get("test_setup_code")]
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part or [])]
    return "\n".join(map(str, lines))


def _entry_point(columns: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the name of the function to call, from a column in `names` or from the column metadata; None if absent."""
    metadata = _decoded(columns.get("metadata"))
    for part in (columns, metadata if isinstance(metadata, Mapping) else {}):
        for name in names:
            if isinstance(value := part.get(name), str) and value.strip():
                return value.strip()
    return None


def _read_script(text: str, entry_point: str | None) -> str:
    """Prepare Python tests for program_tests.py; return "" if the text has no statements, or needs pytest itself.

    Calls of test runners are removed. entry_point: expression for the function of the program that is passed to the
    tests' `check(candidate)`.
    """
    tree = _parse(text)
    if not tree.body or NEEDS_PYTEST.search(text):
        return ""
    nodes = list(ast.walk(tree))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    for name in (module.partition(".")[0] for module in imported):
        if name != "solution" and find_spec(name) is None:
            raise ValueError(f"imports {name}, which is not installed; the program is the module solution")
    body = [node for node in tree.body if not _starts_runner(node)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if "check" not in called and any(isinstance(node, Function) and node.name == "check" for node in body):
        if not entry_point:
            raise ValueError("asserts nothing: check(candidate) needs a column entry_point")
        body += ast.parse(f"check(_find_({entry_point!r}))").body
    return text if body == tree.body else ast.unparse(ast.Module(body, []))


def _is_code(text: str) -> bool:
    try:
        body = _parse(text).body
    except ValueError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) for node in body)


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: nested too deep
        raise ValueError(f"is not Python ({error or type(error).__name__})") from error


def _starts_runner(node: ast.stmt) -> bool:
    calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return isinstance(node, ast.Expr | ast.If) and any(ast.unparse(call.func) in RUNNERS for call in calls)


# -- tests of an input and an output -------------------------------------------------------------------------


def _pairs(tests: Mapping[str, Any], many: bool) -> list[Mapping[str, Any]]:
    """Split {inputs, outputs} into tests with one input and one output each, which keep the other keys.

    many: lists in {input, output} hold one item per test.
    """
    inputs, outputs = (tests.get(f"{name}s", tests.get(name)) for name in ("input", "output"))
    if not ({"input", "inputs"} & tests.keys() and {"output", "outputs"} & tests.keys()):
        raise ValueError(f"holds no tests, but {shorten(repr(dict(tests)))}: {FORMS}")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and (many or "inputs" in tests)):
        inputs, outputs = [inputs], [outputs]
    if len(inputs) != len(outputs):
        raise ValueError(f"has {len(inputs)} inputs and {len(outputs)} outputs: give one output for each input")
    return [{**tests, "input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _pair_tests(pairs: Sequence[Mapping[str, Any]], context: Mapping[str, Any], partial: bool) -> RowTests:
    calls, cases = list[CodeTest](), list[CodeTest]()
    for pair in pairs:
        if pair["output"] is None:
            raise ValueError(f"has no output for the input {shorten(repr(pair['input']))}")
        if entry_point := _function_of(pair, context):
            calls.append(_call(entry_point, pair["input"], pair["output"]))
        else:
            cases.append(CodeTest(stdin=_text(pair["input"]), stdout=_text(pair["output"])))
    if calls and not partial:
        script = "\n".join(call.script or "" for call in calls)
        calls = [CodeTest(script, tuple(values for call in calls for values in call.expected))]
    return RowTests((*calls, *cases), CONTEST_IMPORTS)


def _function_of(pair: Mapping[str, Any], context: Mapping[str, Any]) -> str | None:
    """Return the name of the function that a test calls; None for a test of stdin and stdout."""
    kind = pair.get("testtype", pair.get("type"))
    if kind in STDIN:
        return None
    if kind not in FUNCTIONAL:
        return _entry_point(pair, ENTRY_POINTS) or _entry_point(context, ENTRY_POINTS[:1])
    if not (entry_point := _entry_point(pair, ENTRY_POINTS) or _entry_point(context, ENTRY_POINTS)):
        raise ValueError("has tests of a function, and no column or key fn_name or entry_point names it")
    return entry_point


def _call(entry_point: str, given: Any, expected: Any) -> CodeTest:
    """Return a test that calls the function `entry_point`.

    given: the arguments, as a list or as text with one JSON value per line; expected: the return value.
    """
    if isinstance(given, str):
        arguments = list(map(_json, given.rstrip("\n").split("\n"))) if given.strip() else []
        allowed = [_json(expected) if isinstance(expected, str) else expected]
    else:
        arguments = given if isinstance(given, list) else [given]
        # APPS wraps a result in a list; JSON turns integer keys of a dictionary into strings.
        allowed = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
        arguments, allowed = list(map(_with_int_keys, arguments)), list(map(_with_int_keys, allowed))
    return CodeTest(f"_call_({entry_point!r}, {arguments!r})", (tuple(allowed),))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has a test of a function whose {shorten(text)!r} is not JSON") from error


def _with_int_keys(value: Any) -> Any:
    is_numbered = isinstance(value, dict) and value and all(str(key).lstrip("-").isdecimal() for key in value)
    return {int(key): item for key, item in value.items()} if is_numbered else value


def _text(value: Any) -> str:
    """Return an input or output as text; a list becomes one line per item."""
    if isinstance(value, list | tuple):
        return "\n".join(" ".join(map(str, item)) if isinstance(item, list | tuple) else str(item) for item in value)
    return "" if value is None else str(value)
