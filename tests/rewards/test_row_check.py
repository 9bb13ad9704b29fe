"""Rows are checked at the start for the tests that the reward runs."""

from functools import partial

import pytest

from grpo_mp.rewards.code import check_row_tests
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import UserError


def test_only_rows_whose_set_is_scored_by_code_need_tests() -> None:
    settings = RewardConfig.model_validate({"code": {"tests": "asserts"}, "answer": 1.0})
    check = partial(check_row_tests, settings, {"math": {"answer": 1.0}, "code": {"code": 1.0}})
    for columns in ({}, {"data_set": "code"}, {"data_set": ["no", "name"]}):
        with pytest.raises(UserError, match=r"^rows.jsonl:3: no column asserts.*, the row has: "):
            check(columns, "rows.jsonl:3")
    check({"data_set": "math"}, "rows.jsonl:3")
    check_row_tests(RewardConfig(answer=1.0), {}, {}, "rows.jsonl:3")
