"""The code reward: whether the program in a response passes the tests of its data row.

Tests are read in the formats of published data sets.
"""

import ast
import base64
import json
import pickletools
import re
import secrets
import textwrap
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.settings import DATA_SET, CodeConfig, RewardConfig
from grpo_mp.sandbox.protocol import SandboxError
from grpo_mp.sandbox.sandboxes import PARALLEL, Sandboxes
from grpo_mp.utils.errors import UserError, did_you_mean
from grpo_mp.utils.reading import has_column, read_column, shorten
from grpo_mp.utils.types import SampleGroup

# The opening fence starts its line, indented or not (list items); the closing fence is as long.
BLOCK = re.compile(
    r"^([ \t]*)(`{3,}|~{3,})[ \t]*(?:python|py)[\d.]*\b[^\n]*\n(.*?)^[ \t]*\2", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
PROGRAM_TESTS = Path(__file__).with_name("program_tests.py").read_text()
# For decimal fractions, as in the graders of APPS and TACO
RELATIVE_TOLERANCE = 1e-5
ABSOLUTE_TOLERANCE = 1e-8
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
CHECKS = re.compile(r"\b(?:assert|raise)\b|\w*(?:assert|raises|fail|exit|quit)\w*\(")  # parts of tests that can fail
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
    has no tests in a known format, or has Python tests that assert nothing, which every program would pass.
    """
    if not has_column(columns, column):
        known = shorten(", ".join(map(str, columns)), 300) or "none"
        raise ValueError(
            f"no column {column}{did_you_mean(column, columns)}, the row has: {known}: "
            "set reward.code.tests to the column of the tests"
        )
    value = _decoded(read_column(columns, column))
    context = dict(columns)
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
    setup = ""
    begin = _begin(context)
    beginnings = (context.get(key) for key in BEGINNINGS) if entry_point else ()
    if entry_point and (setup := next((text for text in beginnings if isinstance(text, str) and _is_code(text)), "")):
        name = entry_point.partition("(")[0].partition(".")[0]
        is_defined = re.search(rf"^(?:async )?(?:def|class) {re.escape(name)}\b", setup, re.MULTILINE)
        begin = f"{setup}\n{f'del {name}' if is_defined else ''}\n{begin}"
    texts = [text for text in texts if text.strip()]
    units = texts if partial else ["\n".join(texts)]
    scripts = [_read_script(unit, entry_point) for unit in units]
    if any(scripts) and not CHECKS.search("\n".join(scripts)):
        raise ValueError("asserts nothing, so every program would pass: write assert before what must hold")
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
        inputs = [inputs]
        outputs = [outputs]
    if len(inputs) != len(outputs):
        raise ValueError(f"has {len(inputs)} inputs and {len(outputs)} outputs: give one output for each input")
    return [{**tests, "input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _pair_tests(pairs: Sequence[Mapping[str, Any]], context: Mapping[str, Any], partial: bool) -> RowTests:
    calls = list[CodeTest]()
    cases = list[CodeTest]()
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
        arguments = list(map(_with_int_keys, arguments))
        allowed = list(map(_with_int_keys, allowed))
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


class CodeTests:
    """Scores the programs in responses by their tests. Thread-safe; at most PARALLEL programs run at a time."""

    def __init__(self, settings: CodeConfig) -> None:
        self._settings = settings
        self._sandboxes = Sandboxes("reward.code.sandbox", settings.sandbox)
        self._slots = threading.BoundedSemaphore(PARALLEL)

    def values(self, group: SampleGroup) -> Values:
        """Return 1 for a program that passes all tests, else 0, or with `partial` the share of passed tests.

        A response without a ```python block scores 0. All values are None if the row has no tests.
        """
        try:
            tests = read_tests(group.prompt.columns, self._settings.tests, self._settings.partial)
        except ValueError as error:
            raise RewardError(str(error)) from error
        try:
            return [self._score(sample.text, tests) if tests.cases else None for sample in group.samples]
        except SandboxError as error:
            raise RewardError(f"the program could not be isolated: {error}") from error

    def _score(self, response: str, tests: RowTests) -> float:
        program = extract_program(response)
        if program is None:
            return 0.0
        if tests.setup:
            program = f"exec({tests.setup!r}, globals())\nexec(compile({program!r}, 'program.py', 'exec'), globals())"
        with self._slots:  # the time limit of a response starts when it gets a slot
            deadline = time.monotonic() + self._settings.timeout_s
            num_passed = 0
            for case in tests.cases:
                seconds_left = deadline - time.monotonic()
                passed = seconds_left > 0 and self._passes(program, case, seconds_left)
                if not (passed or self._settings.partial):
                    return 0.0
                num_passed += passed
        return num_passed / len(tests.cases)

    def _passes(self, program: str, case: CodeTest, seconds: float) -> bool:
        if case.script is None:
            outcome = self._sandboxes.run(program, case.stdin, seconds)
            return outcome.status == 0 and is_same_output(outcome.stdout, case.stdout)
        token = secrets.token_hex(16)  # unknown to the program, so that it cannot fake passed tests
        job = f"{PROGRAM_TESTS}\n\nrun({program!r}, {case.script!r}, {token!r})\n"
        _, _, values = self._sandboxes.run(job, "", seconds).stdout.rpartition(token)
        return are_allowed(values, case.expected)


def check_row_tests(
    settings: RewardConfig,
    set_weights: Mapping[str, Mapping[str, float]],
    columns: Mapping[str, Any],
    location: str,
) -> None:
    """Check that the tests of a row can be read, if the code reward applies to the row.

    location: begins the error message; set_weights: by name of a data set, the weights of its reward terms.
    """
    name = columns.get(DATA_SET)
    weights = set_weights.get(name) if isinstance(name, str) else None
    if settings.code and "code" in settings.with_correct(settings.weights if weights is None else weights):
        try:
            read_tests(columns, settings.code.tests, settings.code.partial)
        except ValueError as error:
            raise UserError(f"{location}: {error}") from error


def are_allowed(values: str, expected: Sequence[Sequence[Any]]) -> bool:
    """Return whether each value in `values`, JSON from program_tests.py, equals one of its expected values."""
    try:
        found = json.loads(values, object_hook=_as_dictionary)
    except (ValueError, TypeError, RecursionError):  # the tests did not finish, or a dictionary key is a list
        return False
    return len(found) == len(expected) and all(
        any(value == one for one in allowed) for value, allowed in zip(found, expected, strict=True)
    )


def _as_dictionary(value: dict[str, Any]) -> Any:
    return dict(value["dict"]) if "dict" in value else value


def extract_program(response: str) -> str | None:
    """Return the last closed ```python block without the indentation of its fence; None if there is no such block."""
    blocks = BLOCK.findall(response.replace("\r\n", "\n"))
    if not blocks:
        return None
    indentation, _, content = blocks[-1]
    lines = content.splitlines(keepends=True)
    text = "".join(re.sub(f"^[ \t]{{0,{len(indentation)}}}", "", line) for line in lines)
    return textwrap.dedent(text) if text[:1] in (" ", "\t") else text


def is_same_output(output: str, expected: str) -> bool:
    """Compare two outputs line by line and word by word, without blank lines; numbers compare by value.

    If the expected number has a decimal point or an exponent, a number within the tolerance is equal.
    """
    lines = _words(output)
    expected_lines = _words(expected)
    return list(map(len, lines)) == list(map(len, expected_lines)) and all(
        word == other or _is_same_number(word, other)
        for line, expected_line in zip(lines, expected_lines, strict=True)
        for word, other in zip(line, expected_line, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _is_same_number(word: str, expected: str) -> bool:
    try:
        number = Decimal(word)
        other = Decimal(expected)
    except InvalidOperation:
        return False
    if not (number.is_finite() and other.is_finite()):
        return False
    is_fraction = any(sign in expected for sign in ".eE")
    limit = ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(float(other))
    return number == other or (is_fraction and abs(float(number) - float(other)) <= limit)
