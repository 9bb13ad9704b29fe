import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.errors import UserError
from grpo_mp.rewards import sandbox as sandbox_module
from grpo_mp.rewards.code import extract_program
from grpo_mp.rewards.sandbox import Outcome, Sandbox
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import CodeConfig, RewardConfig
from grpo_mp.types import SampleGroup

MakeGroup = Callable[..., SampleGroup]
ADD = "def add(a, b):\n    return a + b\n"
ECHO = "import sys\nfor line in sys.stdin:\n    print(2 * int(line), '')\n"


def answer(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture
def score(make_group: MakeGroup) -> Callable[..., list[dict[str, float]]]:
    """Parts of the given responses under the given tests; settings of reward.code as keywords."""
    try:
        Sandbox(CodeConfig())
    except UserError as error:
        pytest.skip(f"no namespaces: {error}")

    def run(responses: list[str], rows: Any, **code: Any) -> list[dict[str, float]]:
        scorer = Scorer(RewardConfig.model_validate({"code": {"timeout_s": 20.0, **code}}), max_response_tokens=10)
        group = scorer.score_group(make_group(responses, tests=rows))
        scorer.close()
        return [sample.reward_terms for sample in group.samples]

    return run


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nbetter:\n```python\nb\n```\n```\nc\n```", "b\n"),
        ("```python title=x\na\nb\n```", "a\nb\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python3\na = '```'\nb\n```", "a = '```'\nb\n"),
        ("```\na\n```", None),
        ("a", None),
    ],
)
def test_the_last_closed_block_counts(response: str, program: str | None) -> None:
    assert extract_program(response) == program


@pytest.mark.parametrize(
    "tests", ["assert add(1, 2) == 3\nassert add(0, 0) == 0", ["assert add(1, 2) == 3", "add(0, 0)"]]
)
def test_asserts(tests: Any, score: Callable[..., Any]) -> None:
    wrong = answer("def add(a, b):\n    return a - b")
    assert score([answer(ADD), wrong, "no program", answer("def add(:")], tests) == [
        {"code": 1.0},
        {"code": 0.0},
        {"code": 0.0},
        {"code": 0.0},
    ]


def test_the_share_of_passed_tests(score: Callable[..., Any]) -> None:
    tests = ["assert add(2, 2) == 4", "assert add(1, 2) == 2", "assert add(1, 0) == 1", "assert add(1, 1) == 1"]
    multiply = answer("def add(a, b):\n    return a * b")
    assert score([answer(ADD), multiply], tests, partial=True) == [{"code": 0.5}, {"code": 0.75}]
    assert score([answer(ADD), multiply], tests) == [{"code": 0.0}, {"code": 0.0}]


def test_input_and_output(score: Callable[..., Any]) -> None:
    pairs = [{"input": "1\n2\n", "output": "2\n4"}, {"input": "-3", "output": "-6\n\n"}]
    twice = answer("print(2 * int(input()))")
    fails_after = answer("for line in open(0): print(2 * int(line))\nraise SystemExit(1)")
    assert score([answer(ECHO), twice], pairs, partial=True) == [{"code": 1.0}, {"code": 0.5}]
    assert score([answer(ECHO), twice, fails_after], pairs) == [{"code": 1.0}, {"code": 0.0}, {"code": 0.0}]


def test_rows_without_tests_do_not_count(score: Callable[..., Any]) -> None:
    assert score([answer(ADD), "nothing"], []) == [{}, {}]


@pytest.mark.parametrize(
    "tests", [[1], 7.5, ["assert ("], [{"input": "1"}], [{"input": "1", "output": "1"}, "assert 1"]]
)
def test_invalid_tests(tests: Any, score: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="prompt 12: column 'tests' holds no tests: give"):
        score([answer(ADD)], tests)


def test_a_missing_column(score: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"reward\.code\.tests: the prompts have no column 'asserts'"):
        score([answer(ADD)], "assert 1", tests="asserts")


def test_groups_are_scored_at_once_within_bounds(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    running, peak, lock = [0], [0], threading.Lock()
    run = Sandbox.run

    def counting_run(self: Sandbox, *arguments: Any) -> Outcome:
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        try:
            return run(self, *arguments)
        finally:
            with lock:
                running[0] -= 1

    settings = RewardConfig.model_validate({"code": {"parallel": 2, "timeout_s": 20.0}})
    scorer = Scorer(settings, max_response_tokens=10)
    monkeypatch.setattr(Sandbox, "run", counting_run)
    group = make_group([answer(ADD), answer("exit(0)")], tests="assert add(1, 1) == 2")
    with ThreadPoolExecutor(6) as threads:
        groups = list(threads.map(scorer.score_group, [group] * 6))
    assert [[sample.reward for sample in scored.samples] for scored in groups] == [[1.0, 0.0]] * 6
    assert peak == [2]


def test_waiting_for_a_turn_takes_no_time_from_a_program(make_group: MakeGroup) -> None:
    settings = RewardConfig.model_validate({"code": {"parallel": 1, "timeout_s": 1.5}})
    scorer = Scorer(settings, max_response_tokens=10)
    group = make_group([answer("import time; time.sleep(0.5)")], tests="assert True")
    with ThreadPoolExecutor(4) as threads:
        groups = list(threads.map(scorer.score_group, [group] * 4))
    assert [scored.samples[0].reward for scored in groups] == [1.0] * 4


def test_a_failing_jail_is_not_a_wrong_program(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scorer = Scorer(RewardConfig.model_validate({"code": {}, "on_error": -1.0}), max_response_tokens=10)
    monkeypatch.setattr(sandbox_module, "HARNESS", tmp_path / "gone.py")
    assert scorer.score_group(make_group([answer(ADD)], tests="assert 1")).samples[0].reward == -1.0
    assert scorer.take_stats().failures == {"code": 1}


@pytest.mark.usefixtures("score")
def test_a_user_is_warned_that_programs_are_not_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    def warnings() -> tuple[str, ...]:
        scorer = Scorer(
            RewardConfig.model_validate({"code": {"isolation": "best_effort"}, "correct": "code"}),
            max_response_tokens=10,
        )
        scorer.close()
        return scorer.warnings

    assert warnings() == ()
    refused = "unshare: Operation not permitted"
    monkeypatch.setattr(Sandbox, "_start_failure", lambda sandbox: refused if sandbox.isolated else "")
    assert warnings() == ("reward.code: this kernel gives no namespaces, so programs run with limits only",)
