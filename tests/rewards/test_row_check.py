"""Rows are checked at the start for what rewards need of them."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rewards.base import make_row_check
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import UserError

CODE = """
async def slime(args, sample, **kwargs): return 1.0
def level(prompts, completions, level, **columns): return [1.0] * len(prompts)
def single(completion, level=2, *, prompt, environments, **columns): return 1.0
def singular(completions, prompt, **columns): return [1.0] * len(completions)
class Stateful:
    def __call__(self, completions, log_metric, **columns): return [1.0] * len(completions)
stateful = Stateful()
"""
NOT_COMPLETE = """
async def rm(args, sample): return 1.0
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards_of_a_row.py"
    path.write_text(CODE + NOT_COMPLETE)
    return path


def test_only_rows_whose_set_is_scored_by_code_need_tests() -> None:
    settings = RewardConfig.model_validate({"code": {"tests": "asserts"}, "answer": 1.0})
    check = make_row_check(settings, {"math": {"answer": 1.0}, "code": {"code": 1.0}})
    for columns in ({}, {"data_set": "code"}, {"data_set": ["no", "name"]}):
        with pytest.raises(UserError, match=r"^rows.jsonl:3: no column asserts.*, the row has: "):
            check(columns, "rows.jsonl:3")
    check({"data_set": "math"}, "rows.jsonl:3")
    make_row_check(RewardConfig(answer=1.0), {})({}, "rows.jsonl:3")


@pytest.mark.parametrize(
    ("name", "columns", "missing"),
    [
        ("slime", {"prompt": "x"}, "args, sample"),
        ("level", {"prompt": "x"}, "level"),
        ("level", {"level": None}, ""),
        ("single", {}, ""),
        ("singular", {"prompt": "x"}, "prompt"),
        ("stateful", {}, ""),
    ],
)
def test_a_column_for_each_parameter(name: str, columns: dict[str, Any], missing: str, file: Path) -> None:
    """A column `prompt` is not given to rewards: they get it as prompts."""
    for settings in ({"functions": {f"{file}:{name}": 1.0}}, {"steps": f"{file}:{name}"}):
        if name == "single" and "steps" in settings:
            continue
        check = make_row_check(RewardConfig.model_validate(settings), {"math": {"answer": 1.0}})
        if not missing:
            check(columns, "rows.jsonl:3")
            continue
        term = name if "functions" in settings else "steps"
        sentence = (
            f"^rows.jsonl:3: reward {term} has the parameter {missing}, and the row no such column: write def reward"
        )
        with pytest.raises(UserError, match=sentence):
            check(columns, "rows.jsonl:3")
        if term == name:
            check(columns | {"data_set": "math"}, "a set without this reward")


@pytest.mark.parametrize("name", ["rm", "compute_score"])
def test_functions_of_other_trainers_are_answered_with_what_to_write(name: str, file: Path) -> None:
    settings = RewardConfig.model_validate({"functions": {f"{file}:{name}": 1.0}})
    with pytest.raises(UserError, match=r"it is called with \(prompts=, .*; write def reward\(prompts, completions, "):
        make_row_check(settings, {})
