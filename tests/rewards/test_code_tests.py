"""Rows whose tests test nothing are refused, with the reason; outputs are compared as graders of contests do."""

import base64
import json
import pickle
import re
import zlib
from functools import partial
from typing import Any

import pytest

from grpo_mp.rewards.code import check_row_tests, is_same_output, read_tests
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import UserError


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (
            "def check(candidate):\n    assert candidate(1)",
            "asserts nothing: check(candidate) needs a column entry_point",
        ),
        (["add(1, 2) == 3", "raise_error(0)"], "asserts nothing, so every program would pass"),
        ("print 'python 2'", "is not Python (Missing parentheses"),
        (
            "from my_module import add\nassert add(1, 2) == 3",
            "imports my_module, which is not installed; the program is",
        ),
        (7.5, "holds no tests, but 7.5: give Python tests"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "has 2 inputs and 1 outputs"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "no column or key fn_name or entry_point names it"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tests_that_test_nothing(tests: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^column tests .*{re.escape(reason)}"):
        read_tests({"tests": tests}, "tests")


@pytest.mark.parametrize(
    "tests",
    [
        "if add(1, 2) != 3:\n    raise ValueError('wrong')",
        "import numpy as np\nnp.testing.assert_allclose(add(1, 2), 3)",
        "import os\nif add(1, 2) != 3: os._exit(1)",
    ],
)
def test_what_can_fail_is_a_test(tests: str) -> None:
    assert [case.script for case in read_tests({"tests": tests}, "tests").cases] == [f"\n{tests}"]


PARAMETRIZED = "@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n    assert f(x)"


@pytest.mark.parametrize(
    "tests", [None, " \n", ["", " "], "# none\n", "[]", {"inputs": [], "outputs": []}, PARAMETRIZED]
)
def test_a_row_may_have_no_tests(tests: Any) -> None:
    """Tests with parameters would need pytest in the sandbox."""
    assert read_tests({"tests": tests}, "tests").cases == ()


def test_parts_of_a_list_may_prepare_the_others_unless_each_counts() -> None:
    tests = {"tests": ["s = 3", "assert add(1, 2) == s"]}
    assert len(read_tests(tests, "tests").cases) == 1
    assert len(read_tests(tests, "tests", partial=True).cases) == 2


@pytest.mark.parametrize("protocol", [0, 5])
def test_private_tests_of_livecodebench_are_packed(protocol: int) -> None:
    tests = json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(tests, protocol))).decode()
    (case,) = read_tests({"tests": packed}, "tests").cases
    assert (case.script, case.stdin, case.stdout) == (None, "1 2", "3")
    with pytest.raises(ValueError, match="is not Python"):
        read_tests({"tests": packed[:-8] + "(" * 8}, "tests")


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("  1   2 \n\n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        ("0.33333333", "0.3333333333", True),
        ("3", "3.0", True),
        ("3.000001", "3", False),
        ("50000000000000000", "50000000000000001", False),
        ("nan", "1.0", False),
        ("1e999999", "1.5", False),
        ("007", "7", True),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert is_same_output(output, expected) is same


def test_only_rows_whose_set_is_scored_by_code_need_tests() -> None:
    settings = RewardConfig.model_validate({"code": {"tests": "asserts"}, "answer": 1.0})
    check = partial(check_row_tests, settings, {"math": {"answer": 1.0}, "code": {"code": 1.0}})
    for columns in ({}, {"data_set": "code"}, {"data_set": ["no", "name"]}):
        with pytest.raises(UserError, match=r"^rows.jsonl:3: no column asserts.*, the row has: "):
            check(columns, "rows.jsonl:3")
    check({"data_set": "math"}, "rows.jsonl:3")
    check_row_tests(RewardConfig(answer=1.0), {}, {}, "rows.jsonl:3")
