"""The tests of a data row, in the forms in which data sets of programs are published, read into one form."""

import ast
import base64
import json
import pickletools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mp.rewards.code_scripts import defines, is_code, read_script
from grpo_mp.utils.reading import did_you_mean_column, has_column, read_column, shorten

# Keys of what holds the tests.
HOLDERS = ("ground_truth", "test_cases", "tests", "test_list", "test_code", "test", "functional", "assert_case")
PACKED = "eJ"  # how zlib's bytes begin in base64
BEGINNINGS = ("import_prefix", "prompt")  # keys of Python that the function of entry_point needs before it
ENTRY_POINTS = ("fn_name", "func_name", "function_name", "entry_point")
FUNCTIONAL = ("functional", "function_call", "call_based")  # types of tests that call a function
STDIN = ("stdin", "stdin_stdout", "standard_input")
FORMS = "give Python tests, a list of them, {inputs, outputs}, or a list of {input, output}"
# What graders of contest programs import for them; the last gives back the builtins that math has replaced.
CONTEST_IMPORTS = (
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import *\nfrom typing import *\nfrom builtins import *\n"
)


@dataclass(frozen=True)
class CodeTest:
    """One test: Python that calls the program, or an input and the expected output."""

    script: str | None = None
    stdin: str = ""
    stdout: str = ""


@dataclass(frozen=True)
class RowTests:
    """The tests of a row, and Python that runs before the program; no tests: the row is not scored."""

    cases: tuple[CodeTest, ...] = ()
    setup: str = ""


def read_tests(columns: Mapping[str, Any], column: str, partial: bool = False) -> RowTests:
    """Read the tests of a row; `partial` keeps Python tests apart that otherwise run in one process.

    `column`: its name, or a path such as reward_model.ground_truth.

    Raises ValueError, with the reason: no such column, no tests in a known form, tests that assert nothing.
    """
    if not has_column(columns, column):
        known = shorten(", ".join(map(str, columns)), 300) or "none"
        raise ValueError(
            f"no column {column}{did_you_mean_column(column, columns)}, the row has: {known}: "
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
    """Return the list or dictionary that a text holds as JSON or Python; any other value as it is."""
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
    """Return the JSON of LiveCodeBench's private tests: a pickled text, which is read without running the pickle."""
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
    if entry_point and (setup := next((text for text in beginnings if isinstance(text, str) and is_code(text)), "")):
        name = entry_point.partition("(")[0].partition(".")[0]
        begin = f"{setup}\n{f'del {name}' if defines(setup, name) else ''}\n{begin}"
    texts = [text for text in texts if text.strip()]
    units = texts if partial else ["\n".join(texts)]
    scripts = [read_script(unit, entry_point) for unit in units]
    return RowTests(tuple(CodeTest(f"{begin}\n{script}") for script in scripts if script), setup)


def _begin(context: Mapping[str, Any]) -> str:
    """Return what tests need before them: the columns test_imports and test_setup_code."""
    parts = [context.get("test_imports"), context.get("test_setup_code")]
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part or [])]
    return "\n".join(map(str, lines))


def _entry_point(columns: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the name of the function to call, from a column or from the column metadata; None without one."""
    metadata = _decoded(columns.get("metadata"))
    for part in (columns, metadata if isinstance(metadata, Mapping) else {}):
        for name in names:
            if isinstance(value := part.get(name), str) and value.strip():
                return value.strip()
    return None


# -- tests of an input and an output -------------------------------------------------------------------------


def _pairs(tests: Mapping[str, Any], many: bool) -> list[Mapping[str, Any]]:
    """Return single tests of {inputs, outputs}, each with the other keys; `many`: {input, output} may hold lists."""
    inputs, outputs = (tests.get(f"{name}s", tests.get(name)) for name in ("input", "output"))
    if not ({"input", "inputs"} & tests.keys() and {"output", "outputs"} & tests.keys()):
        raise ValueError(f"holds no tests, but {shorten(repr(dict(tests)))}: {FORMS}")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and (many or "inputs" in tests)):
        inputs, outputs = [inputs], [outputs]
    if len(inputs) != len(outputs):
        raise ValueError(f"has {len(inputs)} inputs and {len(outputs)} outputs: give one output for each input")
    return [{**tests, "input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _pair_tests(pairs: Sequence[Mapping[str, Any]], context: Mapping[str, Any], partial: bool) -> RowTests:
    calls, cases = list[str](), list[CodeTest]()
    for pair in pairs:
        if pair["output"] is None:
            raise ValueError(f"has no output for the input {shorten(repr(pair['input']))}")
        if entry_point := _function_of(pair, context):
            calls.append(_call(entry_point, pair["input"], pair["output"]))
        else:
            cases.append(CodeTest(None, _text(pair["input"]), _text(pair["output"])))
    scripts = calls if partial or not calls else ["\n".join(calls)]
    of_calls = [CodeTest(f"from math import inf, nan\n{script}") for script in scripts]
    return RowTests((*of_calls, *cases), CONTEST_IMPORTS)


def _function_of(pair: Mapping[str, Any], context: Mapping[str, Any]) -> str | None:
    """Return the function that a test calls; None where the program reads its input."""
    kind = pair.get("testtype", pair.get("type"))
    if kind in STDIN:
        return None
    if kind not in FUNCTIONAL:
        return _entry_point(pair, ENTRY_POINTS) or _entry_point(context, ENTRY_POINTS[:1])
    if not (entry_point := _entry_point(pair, ENTRY_POINTS) or _entry_point(context, ENTRY_POINTS)):
        raise ValueError("has tests of a function, and no column or key fn_name or entry_point names it")
    return entry_point


def _call(entry_point: str, given: Any, expected: Any) -> str:
    """Return a test that calls the function; `given`: its arguments, in a list or as a line of JSON each."""
    if isinstance(given, str):
        arguments = list(map(_json, given.rstrip("\n").split("\n"))) if given.strip() else []
        allowed = [_json(expected) if isinstance(expected, str) else expected]
    else:
        arguments = given if isinstance(given, list) else [given]
        # APPS writes a result in a list; JSON makes texts of the keys of a dictionary.
        allowed = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
        arguments, allowed = list(map(_with_int_keys, arguments)), list(map(_with_int_keys, allowed))
    return f"_expect_({entry_point!r}, {arguments!r}, {allowed!r})"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has a test of a function whose {shorten(text)!r} is not JSON") from error


def _with_int_keys(value: Any) -> Any:
    is_numbered = isinstance(value, dict) and value and all(str(key).lstrip("-").isdecimal() for key in value)
    return {int(key): item for key, item in value.items()} if is_numbered else value


def _text(value: Any) -> str:
    """Return an input or output as text: of a list, a line for each item."""
    if isinstance(value, list | tuple):
        return "\n".join(" ".join(map(str, item)) if isinstance(item, list | tuple) else str(item) for item in value)
    return "" if value is None else str(value)
