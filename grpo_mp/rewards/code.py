"""The code reward: whether the program in a response passes the tests of its data row."""

import json
import re
import secrets
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.code_tests import CodeTest, RowTests, read_tests
from grpo_mp.rewards.sandbox import PARALLEL, Sandbox
from grpo_mp.rewards.settings import DATA_SET, CodeConfig, RewardConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleGroup

# The opening fence starts its line, indented or not (list items); the closing fence is as long.
BLOCK = re.compile(
    r"^([ \t]*)(`{3,}|~{3,})[ \t]*(?:python|py)[\d.]*\b[^\n]*\n(.*?)^[ \t]*\2", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
PROGRAM_TESTS = Path(__file__).with_name("program_tests.py").read_text()
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-5, 1e-8  # for decimal fractions, as in the graders of APPS and TACO


class CodeTests:
    """Scores the programs in responses by their tests. Thread-safe; at most PARALLEL programs run at a time."""

    def __init__(self, settings: CodeConfig) -> None:
        self._settings = settings
        self._sandbox = Sandbox(url=settings.url)
        self._slots = threading.BoundedSemaphore(PARALLEL)

    def values(self, group: SampleGroup) -> Values:
        """Return 1 for a program that passes all tests, else 0, or with `partial` the share of passed tests.

        A response without a ```python block scores 0. All values are None if the row has no tests.
        """
        try:
            tests = read_tests(group.prompt.columns, self._settings.tests, self._settings.partial)
        except ValueError as error:
            raise RewardError(str(error)) from error
        return [self._score(sample.text, tests) if tests.cases else None for sample in group.samples]

    def _score(self, response: str, tests: RowTests) -> float:
        program = extract_program(response)
        if program is None:
            return 0.0
        if tests.setup:
            program = f"exec({tests.setup!r}, globals())\nexec(compile({program!r}, 'program.py', 'exec'), globals())"
        with self._slots:  # the time limit of a response starts when it gets a slot
            deadline, num_passed = time.monotonic() + self._settings.timeout_s, 0
            for case in tests.cases:
                seconds_left = deadline - time.monotonic()
                passed = seconds_left > 0 and self._passes(program, case, seconds_left)
                if not (passed or self._settings.partial):
                    return 0.0
                num_passed += passed
        return num_passed / len(tests.cases)

    def _passes(self, program: str, case: CodeTest, seconds: float) -> bool:
        if case.script is None:
            outcome = self._sandbox.run(program, case.stdin, seconds)
            return outcome.succeeded and is_same_output(outcome.output, case.stdout)
        token = secrets.token_hex(16)  # unknown to the program, so that it cannot fake passed tests
        job = f"{PROGRAM_TESTS}\n\nrun({program!r}, {case.script!r}, {token!r})\n"
        _, _, values = self._sandbox.run(job, "", seconds).output.rpartition(token)
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
    lines, expected_lines = _words(output), _words(expected)
    return list(map(len, lines)) == list(map(len, expected_lines)) and all(
        word == other or _is_same_number(word, other)
        for line, expected_line in zip(lines, expected_lines, strict=True)
        for word, other in zip(line, expected_line, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _is_same_number(word: str, expected: str) -> bool:
    try:
        number, other = Decimal(word), Decimal(expected)
    except InvalidOperation:
        return False
    if not (number.is_finite() and other.is_finite()):
        return False
    is_fraction = any(sign in expected for sign in ".eE")
    limit = ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(float(other))
    return number == other or (is_fraction and abs(float(number) - float(other)) <= limit)
