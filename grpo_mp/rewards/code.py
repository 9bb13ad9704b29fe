"""The reward of code: does the program in the response pass the tests of its data row?"""

import ast
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mp.errors import UserError
from grpo_mp.rewards.sandbox import Sandbox
from grpo_mp.rewards.settings import Code
from grpo_mp.rewards.timeouts import Values
from grpo_mp.types import Prompt, SampleGroup

BLOCK = re.compile(r"^[ \t]*```python[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Check:
    """One test: statements that run after the program, or its input and the output that belongs to it."""

    asserts: str | None = None
    stdin: str = ""
    stdout: str = ""


class CodeTests:
    """Scores the programs of groups. Threads may share it: at most `parallel` programs run at one time."""

    def __init__(self, settings: Code) -> None:
        """Raises UserError where programs cannot be isolated as the settings demand."""
        self._settings = settings
        self._sandbox = Sandbox(settings)
        self._slots = threading.BoundedSemaphore(settings.parallel)

    @property
    def isolated(self) -> bool:
        """Whether programs run in namespaces of their own."""
        return self._sandbox.isolated

    def values(self, group: SampleGroup, step: int) -> Values:
        """1 per program that passes all tests, else 0 or the share; None for all where the row has no tests.

        A response without a ```python block scores 0. Raises UserError for tests that are none.
        """
        checks = read_checks(group.prompt, self._settings.tests, joined=not self._settings.partial)
        return [self._value(sample.text, checks) if checks else None for sample in group.samples]

    def _value(self, response: str, checks: Sequence[Check]) -> float:
        program = last_program(response)
        if program is None:
            return 0.0
        with self._slots:  # the time for a response begins when its turn comes
            deadline, passed = time.monotonic() + self._settings.timeout_s, 0
            for check in checks:
                ok = self._passes(program, check, deadline)
                if not (ok or self._settings.partial):
                    return 0.0
                passed += ok
        return passed / len(checks)

    def _passes(self, program: str, check: Check, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        outcome = self._sandbox.run(program, check.asserts, check.stdin, left)
        return outcome.passed and (check.asserts is not None or _lines(outcome.output) == _lines(check.stdout))


def last_program(response: str) -> str | None:
    """What stands in the last closed ```python block; None without one."""
    blocks = BLOCK.findall(response)
    return blocks[-1] if blocks else None


def read_checks(prompt: Prompt, column: str, joined: bool) -> list[Check]:
    """The tests of a data row; `joined` makes one of many assert texts. Raises UserError, naming the prompt."""
    if column not in prompt.columns:
        raise UserError(f"reward.code.tests: the prompts have no column {column!r}: set the column of their tests")
    tests = prompt.columns[column]
    rows: list[Any] = list(tests or []) if isinstance(tests, list | tuple | None) else [tests]
    if all(isinstance(row, dict) and {"input", "output"} <= row.keys() for row in rows):
        return [Check(None, str(row["input"]), str(row["output"])) for row in rows]
    if not all(isinstance(row, str) and _is_python(row) for row in rows):
        raise UserError(
            f"prompt {prompt.index}: column {column!r} holds no tests: give Python asserts, a list of them, or a list "
            "of {input, output}"
        )
    return [Check("\n".join(rows))] if joined else [Check(row) for row in rows]


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _lines(text: str) -> list[str]:
    """Lines without spaces at their ends, and without empty lines at the end: what judges of contests compare."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
