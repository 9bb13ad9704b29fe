"""Rows in the forms in which data sets of programs are published: the right program scores 1, the wrong one 0."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from grpo_mp.rewards.code import CodeTests
from grpo_mp.rewards.settings import CodeConfig
from grpo_mp.utils.types import SampleGroup

MakeGroup = Callable[..., SampleGroup]
MAX = "def largest(xs):\n    return max(xs)\n"
MIN = "def largest(xs):\n    return min(xs)\n"
SOLUTION = "class Solution:\n    def largest(self, xs: List[int]) -> int:\n        return {}(xs)\n"
SUM = "a, b = map(int, input().split())\nprint(a + b)"
DIFFERENCE = "a, b = map(int, input().split())\nprint(a - b)"
KEEP = "def swap(a, b):\n    return a, b\n"
HUMAN_EVAL = {
    "prompt": 'from typing import List\n\ndef shift(x: int) -> int:\n    """Add one."""\n    return x + 1\n\n'
    'def largest(xs: List[int]) -> int:\n    """Return the largest number."""\n',
    "tests": "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([1, 3, 2]) == 3\n"
    "    assert candidate([shift(7), 5]) == 8\n",
    "entry_point": "largest",
}
PYTEST = """import pytest
from solution import largest

def test_largest():
    assert largest([1, 3]) == 3

class TestEdges:
    def setup_method(self):
        self.empty = []
    def test_nothing(self):
        with pytest.raises(ValueError):
            largest(self.empty)
"""
UNITTEST = """import unittest
from solution import largest

class Checks(unittest.TestCase):
    def setUp(self):
        self.xs = [2, 8, 3]
    def test_largest(self):
        self.assertEqual(largest(self.xs), 8)
    def test_nothing(self):
        self.assertRaises(ValueError, largest, [])

if __name__ == "__main__":
    unittest.main()
"""
MBPP = {
    "tests": ["assert largest([1, 3, 2]) == limit", "assert math.isclose(largest([1.5]), 1.5)"],
    "test_setup_code": "limit = 3",
    "test_imports": ["import math"],
}
APPS = {"inputs": ["1 2\n", ["5 6"]], "outputs": ["3\n", ["11"]]}
APPS_FUNCTION = {"fn_name": "largest", "inputs": [[[1, 3]], [[7]]], "outputs": [[3], 7]}
STDIN_STDOUT = {"type": "stdin_stdout", "fn_name": None, "input": "1 2", "output": "3"}
SKYWORK = {
    "entry_point": "Solution().largest",
    "import_prefix": "from typing import *\n",
    "test_code": "def check(candidate):\n    assert candidate(xs=[1, 3]) == 3\n",
}
LCB = [
    {"input": "[1, 3]\n2", "output": "[2, [1, 3]]", "testtype": "functional"},
    {"input": '"x"\n{"k": null}', "output": '[{"k": null}, "x"]', "testtype": "functional"},
]

FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "MBPP": (MBPP, MAX, MIN),
    "HumanEval": (HUMAN_EVAL, MAX, MIN),
    "KodCode": ({"tests": PYTEST}, MAX, MIN),
    "unittest": ({"tests": UNITTEST}, MAX, MIN),
    "APPS, stdin": ({"tests": json.dumps(APPS)}, SUM, DIFFERENCE),
    "APPS, a function": ({"tests": json.dumps(APPS_FUNCTION)}, MAX, MIN),
    "PRIME": ({"tests": {"style": "rule", "ground_truth": json.dumps(APPS)}}, SUM, DIFFERENCE),
    "DeepCoder": ({"tests": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}])}, SUM, DIFFERENCE),
    "LiveCodeBench, a function": (
        {"tests": json.dumps(LCB), "metadata": json.dumps({"func_name": "swap"})},
        "class Solution:\n    def swap(self, a, b): return [b, a]",
        KEEP,
    ),
    "verifiable problems": ({"tests": {"test_cases": [STDIN_STDOUT]}}, SUM, DIFFERENCE),
    "Skywork-OR1": ({"tests": json.dumps(SKYWORK)}, SOLUTION.format("max"), SOLUTION.format("min")),
    "CodeContests": ({"tests": {"input": ["1 2", "2 2"], "output": ["3", "4"]}}, SUM, DIFFERENCE),
    "a list as Python writes it": ({"tests": "['assert largest([1, 3]) == 3']"}, MAX, MIN),
}


@pytest.fixture(scope="module")
def code(sandbox: None) -> CodeTests:
    return CodeTests(CodeConfig(timeout_s=60.0))


@pytest.mark.parametrize("name", FORMS)
def test_published_forms(name: str, code: CodeTests, make_group: MakeGroup) -> None:
    columns, right, wrong = FORMS[name]
    group = make_group([f"```python\n{program}\n```" for program in (right, wrong)], **columns)
    assert code.values(group) == [1.0, 0.0]


def test_a_main_block_of_the_program_does_not_run_under_tests(code: CodeTests, make_group: MakeGroup) -> None:
    program = f"{MAX}\nif __name__ == '__main__':\n    print(largest(list(map(int, input().split()))))\n"
    response = f"```python\n{program}\n```"
    assert code.values(make_group([response], tests="assert largest([2, 1]) == 2")) == [1.0]
    assert code.values(make_group([response], tests=[{"input": "2 1", "output": "2"}])) == [1.0]


def test_shares_of_calls_and_of_lines(make_group: MakeGroup, code: CodeTests) -> None:
    partial = CodeTests(CodeConfig(timeout_s=60.0, partial=True))
    tests = {"fn_name": "largest", "inputs": [[[1, 1]], [[1, 2]]], "outputs": [1, 2]}
    assert partial.values(make_group([f"```python\n{MIN}\n```"], tests=tests)) == [0.5]
    tests = {"inputs": ["1 0", "1 2"], "outputs": ["1", "3"]}
    assert partial.values(make_group([f"```python\n{DIFFERENCE}\n```"], tests=tests)) == [0.5]
