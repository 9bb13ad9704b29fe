from collections.abc import Callable
from typing import Any

import pytest

from grpo_mp.rewards.code import extract_program
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.sandbox import commands
from grpo_mp.utils.types import SampleGroup

MakeGroup = Callable[..., SampleGroup]
ADD = "def add(a, b):\n    return a + b\n"
ECHO = "import sys\nfor line in sys.stdin:\n    print(2 * int(line), '')\n"


def answer(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture
def score(make_group: MakeGroup, sandbox: None) -> Callable[..., list[float]]:
    """Scores of the given responses under the given tests; settings of reward.code as keywords."""

    def run(responses: list[str], rows: Any, **code: Any) -> list[float]:
        scorer = Scorer(RewardConfig.model_validate({"code": {"timeout_s": 20.0, **code}}), max_response_tokens=10)
        group = scorer.score_group(make_group(responses, tests=rows))
        scorer.close()
        assert all(sample.reward_terms.keys() == {"code"} for sample in group.samples)
        return [sample.reward_terms["code"] for sample in group.samples]

    return run


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nbetter:\n```python\nb\n```\n```\nc\n```", "b\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python3\na = '```'\nb\n```", "a = '```'\nb\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("1. So:\n\n   ```python\n   if a:\n       b\n\n   ```\n", "if a:\n    b\n\n"),
        ("- So:\n\t```python\n\ta\n  b\n\t```", "a\n b\n"),
        ("```\na\n```", None),
        ("```pycon\na\n```", None),
    ],
)
def test_the_last_closed_block_counts(response: str, program: str | None) -> None:
    assert extract_program(response) == program


@pytest.mark.parametrize(
    "tests", ["assert add(1, 2) == 3\nassert add(0, 0) == 0", ["assert add(1, 2) == 3", "add(0, 0)"]]
)
def test_asserts(tests: Any, score: Callable[..., Any]) -> None:
    wrong = answer("def add(a, b):\n    return a - b")
    assert score([answer(ADD), wrong, "no program", answer("def add(:")], tests) == [1.0, 0.0, 0.0, 0.0]


# What leaves before the tests end, or says that they passed.
TAMPERING = {
    "leaves": "import os\ndef add(a, b): os._exit(0)",
    "exits": "import sys\ndef add(a, b): sys.exit(0)",
    "ends the tests": "import os, signal\ndef add(a, b): [os.kill(os.getppid(), n) for n in (2, 9, 15)]",
    "replaces the exception": """
import builtins
builtins.AssertionError = SystemExit
def add(a, b): pass
""",
    "replaces builtins": """
import builtins
builtins.abs = lambda x: 0
abs = len = builtins.len = lambda x: 0
def add(a, b): return 1j
""",
    "prints the mark": "print('passed'); import os\ndef add(a, b): os.write(1, b'passed'); os.write(2, b'passed')",
}


def test_an_answer_cannot_tamper_with_asserts(score: Callable[..., Any]) -> None:
    test = "import math\nassert abs(add(1, 2) - 3) < 1e-6 and add(1, 2) in {3} and math.isclose(add(1, 2), 3)"
    scored = score([answer(ADD), *map(answer, TAMPERING.values())], test)
    assert scored[0] == 1.0
    assert [name for name, value in zip(TAMPERING, scored[1:], strict=True) if value] == []


def test_the_share_of_passed_tests(score: Callable[..., Any]) -> None:
    tests = ["assert add(2, 2) == 4", "assert add(1, 2) == 2", "assert add(1, 0) == 1", "assert add(1, 1) == 1"]
    multiply = answer("def add(a, b):\n    return a * b")
    assert score([answer(ADD), multiply], tests, partial=True) == [0.5, 0.75]
    assert score([answer(ADD), multiply], tests) == [0.0, 0.0]


def test_input_and_output(score: Callable[..., Any]) -> None:
    pairs = [{"input": "1\n2\n", "output": "2\n4"}, {"input": "-3", "output": "-6\n\n"}]
    twice = answer("print(2 * int(input()))")
    fails_after = answer("for line in open(0): print(2 * int(line))\nraise SystemExit(1)")
    assert score([answer(ECHO), twice], pairs, partial=True) == [1.0, 0.5]
    assert score([answer(ECHO), twice, fails_after], pairs) == [1.0, 0.0, 0.0]


def test_a_failing_sandbox_is_not_a_wrong_program(
    score: Callable[..., Any], make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = Scorer(RewardConfig.model_validate({"code": {}, "on_error": -1.0}), max_response_tokens=10)
    monkeypatch.setattr(commands, "SYSTEM", ("/usr",))  # without the loader nothing starts
    monkeypatch.setenv("PATH", "/nowhere")
    assert scorer.score_group(make_group([answer(ADD)], tests="assert add")).samples[0].reward == -1.0
    assert scorer.take_stats().failures == {"code": 1}


def test_values_are_compared_where_the_program_is_not(score: Callable[..., Any]) -> None:
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
    cheats = (
        "class All(int):\n    def __eq__(self, other): return True\ndef f(x): return All(7)",
        "import builtins\ndef f(x): print(2)\nbuiltins.print = f",
        "def f(x): return {'dict': 2}",
    )
    assert score([answer("def f(x): return 2 * x"), *map(answer, cheats)], tests) == [1.0, 0.0, 0.0, 0.0]
