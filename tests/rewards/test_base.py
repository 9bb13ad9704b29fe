import json
from pathlib import Path

import pytest

from grpo_mp.rewards.base import REWARDS, call_reward
from grpo_mp.utils.errors import UserError


def test_functions_load_from_modules_and_files(tmp_path: Path) -> None:
    assert REWARDS.resolve("json:dumps", "reward.functions") is json.dumps
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 2\n"
        "def score(completions, **columns):\n    return [A().x] * len(completions)\n"
    )
    reward = REWARDS.resolve(f"{tmp_path / 'mine.py'}:score", "reward.functions")
    assert reward(prompts=["a"], completions=["b"]) == [2]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("os.path", "write module:function"),
        ("no_such_module_x:f", "ModuleNotFoundError: No module named 'no_such_module_x'"),
        ("os.path:jion", r"os.path has no jion \(did you mean join\?\)"),
        ("os.path:join", r"it is called with \(prompts=, completions=, .*log_metric=\): got an unexpected keyword arg"),
        ("no/such.py:f", "no such file: no/such.py"),
    ],
)
def test_an_import_that_fails_is_reported_with_its_reason(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        REWARDS.resolve(name, "reward.functions")


def test_a_file_imports_its_neighbours_in_processes_too(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("def half(text):\n    return len(text) / 2\n")
    (tmp_path / "mine_with_neighbour.py").write_text(
        "from multiprocessing import get_context\nfrom neighbour_of_mine import half\n"
        "def score(completions, **columns):\n"
        "    with get_context('spawn').Pool(1) as pool:\n        return pool.map(half, completions)\n"
    )
    reward = REWARDS.resolve(f"{tmp_path / 'mine_with_neighbour.py'}:score", "reward.functions")
    assert call_reward(reward, {"prompts": ["a"], "completions": ["abc"]}) == [1.5]
