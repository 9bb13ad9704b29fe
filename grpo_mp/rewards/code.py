"""The code reward: whether the program in a response passes the tests of its data row."""

import ast
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mp.errors import UserError
from grpo_mp.reading import has_column, read_column
from grpo_mp.rewards.base import Values
from grpo_mp.rewards.sandbox import Sandbox
from grpo_mp.rewards.settings import CodeConfig
from grpo_mp.types import Prompt, SampleGroup

BLOCK = re.compile(r"^[ \t]*```python[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class TestCase:
    """One test: statements that run after the program, or an input and the expected output."""

    asserts: str | None = None
    stdin: str = ""
    stdout: str = ""


class CodeTests:
    """Scores the programs of groups. Thread-safe: at most `parallel` programs run at one time."""

    def __init__(self, settings: CodeConfig) -> None:
        """Check the sandbox. Raises UserError where programs cannot be isolated as the settings demand."""
        self._settings = settings
        self.sandbox = Sandbox(settings)
        self._slots = threading.BoundedSemaphore(settings.parallel)

    def values(self, group: SampleGroup) -> Values:
        """Return 1 for a program that passes all tests, else 0 or the share; None for all where the row has no tests.

        A response without a ```python block scores 0. Raises UserError for a column that holds no tests.
        """
        cases = read_test_cases(group.prompt, self._settings.tests, joined=not self._settings.partial)
        return [self._score(sample.text, cases) if cases else None for sample in group.samples]

    def _score(self, response: str, cases: Sequence[TestCase]) -> float:
        program = extract_program(response)
        if program is None:
            return 0.0
        with self._slots:  # the time for a response begins when its turn comes
            deadline, num_passed = time.monotonic() + self._settings.timeout_s, 0
            for case in cases:
                passed, seconds_left = False, deadline - time.monotonic()
                if seconds_left > 0:
                    outcome = self.sandbox.run(program, case.asserts, case.stdin, seconds_left)
                    judged_inside = case.asserts is not None
                    same_output = judged_inside or _stripped_lines(outcome.output) == _stripped_lines(case.stdout)
                    passed = outcome.passed and same_output
                if not (passed or self._settings.partial):
                    return 0.0
                num_passed += passed
        return num_passed / len(cases)


def extract_program(response: str) -> str | None:
    """Return the content of the last closed ```python block; None without one."""
    blocks = BLOCK.findall(response)
    return blocks[-1] if blocks else None


def read_test_cases(prompt: Prompt, column: str, joined: bool) -> list[TestCase]:
    """Read the tests of a data row; `joined` makes one of many assert texts. A text without statements is no test.

    Raises UserError, naming the prompt.
    """
    if not has_column(prompt.columns, column):
        raise UserError(f"reward.code.tests: the prompts have no column {column!r}: set the column of their tests")
    tests = read_column(prompt.columns, column)
    rows: list[Any] = list(tests or []) if isinstance(tests, list | tuple | None) else [tests]
    if all(isinstance(row, dict) and "input" in row and row.get("output") is not None for row in rows):
        inputs = ["" if row["input"] is None else str(row["input"]) for row in rows]
        return [TestCase(None, text, str(row["output"])) for text, row in zip(inputs, rows, strict=True)]
    counts = [_count_statements(row) if isinstance(row, str) else None for row in rows]
    if None in counts:
        raise UserError(
            f"prompt {prompt.index}: column {column!r} holds no tests: give Python asserts, a list of them, or a list "
            "of {input, output}"
        )
    texts = [row for row, count in zip(rows, counts, strict=True) if count]  # any program would pass the others
    return [TestCase("\n".join(texts))] if joined and texts else [TestCase(text) for text in texts]


def _count_statements(text: str) -> int | None:
    """Return the statements at the top level of a Python text; None for what is none."""
    try:
        return len(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deep
        return None


def _stripped_lines(text: str) -> list[str]:
    """Split into lines without trailing spaces and trailing empty lines, as contest judges compare them."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
