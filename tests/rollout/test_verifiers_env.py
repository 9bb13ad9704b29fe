"""Environments of the verifiers library, where it is installed, with its own harness and without an engine."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config.registries import DATA_SOURCES, ROLLOUT_FUNCTIONS
from grpo_mp.data.rows import read_rows
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Sample
from tests.episode_page import read_example
from tests.episodes.test_chat import make_renderer
from tests.rollout.engineless import TextClient, make_prompt, make_runner, roll_out

needs_verifiers = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")
TASKSET = """
import verifiers.v1 as vf

class RowData(vf.TaskData):
    answer: str = ""

class Row(vf.Task[RowData]):
    @vf.reward(weight=2.0)
    async def shouts(self, trace) -> float:
        if self.data.answer == "fails":
            raise ValueError("no way")
        return sum((message.content or "").isupper() for message in trace.assistant_messages)

    @vf.metric
    async def turns(self, trace) -> float:
        return len(trace.assistant_messages)

class RowsConfig(vf.TasksetConfig):
    answers: list[str] = ["yes", "yes"]

class Rows(vf.Taskset[Row, RowsConfig]):
    def load(self):
        for number, answer in enumerate(self.config.answers):
            yield Row(RowData(prompt=f"row {number}?", system_prompt="Shout.", answer=answer), self.config.task)

class Endless(Rows):
    INFINITE = True

__all__ = ["Rows"]
"""
# Two agents that are trained, of which the first has a conversation of two turns, and one that is not.
ENVIRONMENT = """
import verifiers.v1 as vf

class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()

class Duel(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        async with agents.first.interaction(task) as talk:
            await talk.turn()
            await agents.second.run(task)
            await talk.turn("again")
        await agents.judge.run(task)

__all__ = ["Duel"]
"""
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
# In place of uv, which would fetch the packages of a harness from an index: the packages are those of the tests.
UV = """#!/bin/sh
case "$*" in *--help) echo --script;; "python find "*) echo {python};; esac
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grpo_mp_rows.py").write_text(TASKSET)
    (tmp_path / "grpo_mp_endless.py").write_text(TASKSET.replace('["Rows"]', '["Endless"]'))
    (tmp_path / "grpo_mp_duel.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV.format(python=sys.executable))
    (tmp_path / "bin/uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))


def play(
    settings: dict[str, Any], row: dict[str, Any], texts: Sequence[str], **config: Any
) -> tuple[Sample, TextClient]:
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, [f"{text}<|im_end|>" for text in texts])
    runner = make_runner(client, "verifiers", function_args=settings, **config)
    return roll_out(runner, replace(make_prompt(runner), columns=row)), client


def read(name: str) -> list[dict[str, Any]]:
    return [row.columns for row in read_rows(name, "verifiers")]


@needs_verifiers
def test_the_example_of_the_page_is_played(tmp_path: Path) -> None:
    settings = read_example("Environments of verifiers", tmp_path)
    assert settings["rollout"]["function"] == settings["data"]["source"] == "verifiers"
    assert settings["data"]["prompt_column"] == "prompt"
    rows = read('grpo_mp_rows:{"answers": ["", "yes", "no"]}')
    assert [row["prompt"][-1] for row in rows] == [{"role": "user", "content": f"row {number}?"} for number in range(3)]
    arguments = settings["rollout"]["function_args"] | {"taskset": {"id": "grpo_mp_rows"}}
    assert arguments["agent"] == AGENT
    sample, client = play(arguments, rows[1], ["LOUD"])
    assert (sample.error, sample.state, sample.episode_reward, sample.role) == ("", "completed", 2.0, "agent")
    assert (sample.metrics["agent/shouts"], sample.metrics["agent/turns"], sample.metrics["forks"]) == (1, 1, 0)
    decode = client.tokenizer.decode
    assert decode(sample.tokens) == "LOUD<|im_end|>"
    assert decode(sample.prompt_tokens).count("row 1?") == decode(sample.prompt_tokens).count("Shout.") == 1


@needs_verifiers
def test_a_harness_runs_the_tools_that_the_policy_calls() -> None:
    (row,) = read('grpo_mp_rows:{"answers": ["yes"]}')
    settings = {"taskset": {"id": "grpo_mp_rows"}, "agent": AGENT | {"harness": {"id": "bash"}}}
    sample, client = play(settings, row, ['[bash]({"command": "expr 6 + 36"})', "DONE"], tool_parser="qwen25")
    assert (sample.error, sample.metrics["turns"], sample.metrics["forks"]) == ("", 2, 0)
    assert "Run a bash command" in client.tokenizer.decode(sample.prompt_tokens)
    given = [token for token, own in zip(sample.tokens, sample.generated, strict=True) if not own]
    assert "42" in client.tokenizer.decode(given)


@needs_verifiers
def test_agents_are_roles_with_rewards_of_their_own() -> None:
    (row,) = read('grpo_mp_rows:{"answers": ["yes"]}')
    settings = {"id": "grpo_mp_duel", "taskset": {"id": "grpo_mp_rows"}}
    sample, client = play(
        settings | dict.fromkeys(("first", "second", "judge"), AGENT), row, ["ONE", "two", "THREE", "4"]
    )
    assert (sample.error, sample.metrics["turns"], sample.metrics["forks"]) == ("", 3, 0)
    assert [one.role for one in sample.sequences] == ["second", "first"]
    decode = client.tokenizer.decode
    own = [
        decode([token for token, generated in zip(one.tokens, one.generated, strict=True) if generated])
        for one in sample.sequences
    ]
    assert own == ["two<|im_end|>", "ONE<|im_end|>THREE<|im_end|>"]
    assert "again" in decode(sample.tokens)
    assert [[reward for _, reward in one.step_rewards] for one in sample.sequences] == [[0.0], [4.0]]
    assert sample.episode_reward == 2.0
    assert [sample.metrics[f"{name}/turns"] for name in ("first", "second", "judge")] == [2, 1, 1]


@needs_verifiers
def test_failures_of_an_environment_are_of_the_episode() -> None:
    (row,) = read('grpo_mp_rows:{"answers": ["fails"]}')
    settings = {"taskset": {"id": "grpo_mp_rows"}, "agent": AGENT}
    sample, _ = play(settings, row, ["LOUD"])
    assert sample.state == "error"
    assert "the environment ended with TaskError: " in sample.error
    assert "no way" in sample.error
    sample, _ = play(settings, {"task": {"idx": "no number"}}, [])
    assert sample.state == "error"
    assert "ValidationError" in sample.error


@needs_verifiers
def test_an_agent_that_meets_a_limit_ends_and_is_scored() -> None:
    (row,) = read('grpo_mp_rows:{"answers": ["yes"]}')
    settings = {"id": "grpo_mp_duel", "taskset": {"id": "grpo_mp_rows"}}
    sample, _ = play(settings | dict.fromkeys(("first", "second", "judge"), AGENT), row, ["ONE"], limits={"turns": 2})
    assert (sample.error, sample.state, sample.metrics["turns"]) == ("", "truncated", 2)
    assert sample.episode_reward == 2.0


@needs_verifiers
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taskset": {"id": "no_such"}}, "loading it failed: ModuleNotFoundError: taskset 'no_such' not found"),
        ({"taskset": {"id": "grpo_mp_rows"}, "agnt": AGENT}, "agnt"),
        ({}, "needs a seed taskset"),
    ],
)
def test_bad_settings_are_refused_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        ROLLOUT_FUNCTIONS.resolve("verifiers", "rollout.function", settings)
    assert str(refused.value).startswith("rollout.function_args: ")
    assert message in str(refused.value)


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such", "no_such: loading it failed: ModuleNotFoundError"),
        ("grpo_mp_endless", "grpo_mp_endless: loading it failed: ValueError: it has no end"),
        ("grpo_mp_rows:{", "the settings of 'grpo_mp_rows:{': not valid JSON"),
        ('grpo_mp_rows:{"answer": []}', "grpo_mp_rows: loading it failed: ValidationError"),
    ],
)
def test_a_taskset_that_cannot_be_read_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        list(DATA_SOURCES.resolve("verifiers", "data.source")(name))
    assert str(refused.value).startswith("data.source=verifiers: ")
    assert message in str(refused.value)


def test_a_missing_library_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(
        UserError, match=r"rollout.function_args: verifiers is missing here, or of another version .*pip"
    ):
        ROLLOUT_FUNCTIONS.resolve("verifiers", "rollout.function", {"taskset": {"id": "x"}})
