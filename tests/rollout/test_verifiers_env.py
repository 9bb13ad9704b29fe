"""An environment of the verifiers library, where it is installed, on the real engine."""

import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config.registries import DATA_SOURCES, ROLLOUT_FUNCTIONS
from grpo_mp.data.rows import read_rows
from grpo_mp.rollout.verifiers_env import load_environment
from grpo_mp.utils.errors import UserError
from tests.episode_page import read_example

IS_INSTALLED = importlib.util.find_spec("verifiers") is not None
ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]

def shouts(completion, answer):
    return sum(message.role == "assistant" for message in completion) + 0.25 * (answer == "yes")

def load_environment(rows=2):
    def alone(completion):
        return 0.5
    data = Dataset.from_list([{"question": f"row {row}?", "answer": "yes"} for row in range(rows)])
    funcs = [shouts, alone]
    return Again(max_turns=2, dataset=data, system_prompt="Shout.", rubric=vf.Rubric(funcs=funcs, weights=[1.0, 0.0]))
"""


def test_a_missing_library_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.utils.env_utils", raising=False)
    load_environment.cache_clear()
    with pytest.raises(
        UserError, match=r"environment 'x' of verifiers: the library is missing here, or of another version"
    ):
        ROLLOUT_FUNCTIONS.resolve("verifiers", "rollout.function", {"environment": "x"})
    with pytest.raises(UserError, match="no JSON"):
        list(read_rows("x:train:{", "verifiers"))
    with pytest.raises(UserError, match="is not NAME, NAME:train or NAME:eval"):
        list(DATA_SOURCES.resolve("verifiers", "data.source")("x:test"))


@pytest.mark.skipif(not IS_INSTALLED, reason="the package verifiers is not installed")
def test_an_environment_plays_episodes(
    roll_out: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo_mp_again.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    settings = read_example("Environments of verifiers", tmp_path)
    assert settings["rollout"]["function"] == settings["data"]["source"] == "verifiers"
    rows = [row.columns for row in read_rows('grpo_mp_again:train:{"rows": 3}', "verifiers")]
    assert [row["prompt"][-1]["content"] for row in rows] == ["row 0?", "row 1?", "row 2?"]
    args = {"environment": "grpo_mp_again", "args": {"rows": 3}}
    _, group = roll_out("verifiers", function_args=args, limits={"turn_tokens": 6}, columns=rows[1])
    for sample in group.samples:
        assert sample.error == ""
        assert sample.metrics["turns"] == 2 == sample.metrics["shouts"] - 0.25
        assert (sample.metrics["alone"], sample.metrics["forks"], sample.episode_reward) == (0.5, 0, 2.25)
        assert sample.given_tokens > 0
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(UserError, match="environment 'no_such_env' of verifiers: loading it failed"):
        load_environment("no_such_env", "{}")
