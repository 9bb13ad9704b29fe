"""Repositories that an episode repairs by bash and edits in a real sandbox."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mp.data.rows import read_rows
from grpo_mp.rollout.harbor import REWARDS, read_tasks
from grpo_mp.rollout.protocol import ToolCall, ToolResult
from grpo_mp.rollout.tools import EpisodeTools, ToolKit, load_tools
from grpo_mp.rollout.workspace_tool import read_number
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Sample
from tests.rollout.engineless import TextClient, make_prompt, make_runner, roll_out
from tools.tiny.repositories import OPERATORS, Repository, make_problems, tokenizer

pytestmark = pytest.mark.usefixtures("sandbox")
PATH = "grpo_mp.rollout.workspace_tool:Workspace"
ROW = Repository("multiply", "price", ("a", "b"), "+", (7, 5)).row
READS = '[bash]({"command": "cat price.py"})'
REPAIRS = '[edit]({"path": "price.py", "old": "a + b", "new": "a * b"})'
SPOILS = '[edit]({"path": "price.py", "old": "a + b", "new": "a - b"})'
CHEATS = '[bash]({"command": "echo > test.py"})'


def roll_out_turns(*turns: str, row: dict[str, Any] = ROW) -> tuple[Sample, TextClient]:
    client = TextClient(tokenizer(), [f"{turn}<|im_end|>" for turn in turns])
    runner = make_runner(client, None, tools=[PATH], tool_parser="pythonic", limits={"tool_s": 60, "turns": 5})
    return roll_out(runner, replace(make_prompt(runner), columns=row)), client


def test_the_tests_of_the_row_reward_the_episode() -> None:
    for turns, reward in (
        ((READS, REPAIRS, "done"), 1.0),
        ((SPOILS, "done"), 0.0),
        (("done",), 0.0),
        ((CHEATS, "done"), 0.0),  # the tests are written after the last turn
    ):
        sample, _ = roll_out_turns(*turns)
        assert (sample.episode_reward, sample.state) == (reward, "completed")


def test_sampled_tokens_are_trained_on_and_results_are_given() -> None:
    sample, client = roll_out_turns(READS, REPAIRS, "done")
    words = client.tokenizer
    generated = [token for token, own in zip(sample.tokens, sample.generated, strict=True) if own]
    assert words.decode(generated) == f"{READS}<|im_end|>{REPAIRS}<|im_end|>done<|im_end|>"
    given = [token for token, own in zip(sample.tokens, sample.generated, strict=True) if not own]
    assert "<|tool|>def price(a, b):\n    return a + b" in words.decode(given)
    assert "<|tool|>edited price.py" in words.decode(given)
    assert set(sample.metrics) >= {"turn_s", "bash_s", "edit_s"}
    assert 0 < sample.metrics["bash_s"] < 60


def test_a_row_whose_setup_fails_is_an_error_of_the_episode() -> None:
    sample, _ = roll_out_turns("done", row=ROW | {"setup": "echo no such package >&2; exit 3"})
    assert sample.state == "error"
    assert "the setup of the row failed: no such package" in sample.error


LOOP = asyncio.new_event_loop()  # one for all calls: worker processes belong to it


def call(tools: EpisodeTools, name: str, **arguments: str) -> ToolResult:
    return LOOP.run_until_complete(tools.call(ToolCall(name, arguments)))


def open_workspace(columns: dict[str, Any], **arguments: Any) -> tuple[ToolKit, EpisodeTools]:
    kit = load_tools([PATH], arguments={PATH: arguments})
    tools = LOOP.run_until_complete(kit.open(60.0, 4096))
    LOOP.run_until_complete(tools.reset(columns))
    return kit, tools


def test_commands_share_files_and_have_limits() -> None:
    kit, tools = open_workspace({"files": {"lib/one.py": "x = 1\n"}, "setup": "touch made"}, folder="src", timeout_s=2)
    assert call(tools, "bash", command="ls; cd lib; pwd").text == "lib\nmade\n/program/src/lib\n"
    assert call(tools, "bash", command="pwd").text == "/program/src\n"
    assert call(tools, "bash", command="echo seen >&2; exit 4").text == "seen\n\n(exit status 4)"
    assert "ended at its time limit" in call(tools, "bash", command="sleep 30").text
    assert call(tools, "edit", path="lib/one.py", old="x = 2", new="x = 3") == ToolResult(
        "Error: ValueError: the old text occurs 0 times in lib/one.py: give a text that occurs once", "raised"
    )
    assert call(tools, "edit", path="lib/two.py", old="", new="y = 2\n").text == "wrote lib/two.py"
    assert call(tools, "bash", command="cat lib/one.py lib/two.py").text == "x = 1\ny = 2\n"
    assert "No such file" in call(tools, "edit", path="lib/three.py", old="x", new="y").text
    flood = call(tools, "bash", command="yes | head -c 100000")
    assert flood.text.endswith("characters left out)")
    assert len(flood.text) < 5000
    LOOP.run_until_complete(tools.close())
    LOOP.run_until_complete(kit.close())


def test_a_sandbox_ends_with_its_episode() -> None:
    kit, tools = open_workspace({"files": {}})
    call(tools, "bash", command="sleep 1234 & echo")
    until = time.monotonic() + 60
    while not sleeping():  # its shell has forked, and the fork becomes `sleep` when it gets a core
        assert time.monotonic() < until
        time.sleep(0.02)
    LOOP.run_until_complete(tools.close())
    LOOP.run_until_complete(kit.close())
    psutil.wait_procs(sleeping(), timeout=60)
    assert not sleeping()


def sleeping() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1234"]]


def test_a_sandbox_that_cannot_start_is_refused_at_the_start() -> None:
    with pytest.raises(UserError, match=r"isolated by docker:x \(.*: find out why `docker run x` fails here, or"):
        load_tools([PATH], arguments={PATH: {"sandbox": "docker:x"}})
    _, tools = open_workspace({"image": ""}, sandbox="bubblewrap{image}")
    assert call(tools, "bash", command="echo here").text == "here\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "No such file"),
        ("exit 1", "exit status 1"),
        ("echo no daemon >&2; exit 1", "no daemon"),
    ],
)
def test_a_container_program_that_does_not_answer_is_refused_where_rows_name_the_images(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=rf"`docker version` fails here \(.*{reason}.*\): start its service, or name"):
        load_tools([PATH], arguments={PATH: {"sandbox": "docker:{image}"}})


def test_problems_fail_their_tests_until_they_are_repaired(tmp_path: Path) -> None:
    train, held_out = make_problems(300, 100, 0)
    assert len({json.dumps(problem.row) for problem in (*train, *held_out)}) == 400
    for problem in train[:50]:
        outcomes = []
        for code in (problem.code, problem.code.replace(problem.wrong, OPERATORS[problem.kind])):
            names: dict[str, Any] = {}
            exec(code, names)
            test = problem.row["tests"]["test.py"].partition("\n")[2]
            try:
                exec(test, names)
                outcomes.append("passed")
            except AssertionError:
                outcomes.append("failed")
        assert outcomes == ["failed", "passed"]


def make_task(folder: Path, settings: str = "") -> Path:
    """A task as `harbor init` lays it out, whose tests give half a reward for a file and all for its content."""
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n' + settings)
    (folder / "instruction.md").write_text("Write hello into greeting.txt.")
    (folder / "environment/Dockerfile").write_text("FROM debian:12\nWORKDIR /app\nRUN true\n")
    (folder / "tests/test.sh").write_text(
        f"if [ ! -e greeting.txt ]; then n=0; elif grep -q hello greeting.txt; then n=1; else n=0.5; fi\n"
        f"echo noise; echo $n > {REWARDS}/reward.txt\n"
    )
    return folder


def test_tasks_of_harbor_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path / "greeting")
    make_task(tmp_path / "more" / "named", '[environment]\ndocker_image = "registry/named:1"\nworkdir = "/srv"\n')
    first, second = read_rows(str(tmp_path), "harbor").columns
    assert (first["question"], first["image"], first["folder"]) == (
        "Write hello into greeting.txt.",
        "greeting",
        "/app",
    )
    assert (second["task"], second["image"], second["folder"]) == ("named", "registry/named:1", "/srv")
    (tmp_path / "greeting/task.toml").write_text('[[steps]]\nname = "one"\n')
    with pytest.raises(UserError, match=r"greeting: steps of task\.toml is not supported"):
        read_rows(str(tmp_path), "harbor")
    (tmp_path / "greeting/task.toml").write_text('[verifier]\nenvironment_mode = "separate"\n')
    with pytest.raises(UserError, match="greeting: tests in a container of their own are not supported"):
        read_rows(str(tmp_path), "harbor")
    with pytest.raises(UserError, match=r"no folder with a task\.toml"):
        read_rows(str(tmp_path / "more/named/tests"), "harbor")


@pytest.mark.parametrize(
    ("command", "reward"), [("touch greeting.txt", 0.5), ("echo hello > greeting.txt", 1.0), ("ls", 0.0)]
)
def test_the_tests_of_a_harbor_task_give_the_reward(tmp_path: Path, command: str, reward: float) -> None:
    """In bubblewrap, where only the working folder can be written; in a container the places are Harbor's own."""
    assert reward_after(command, make_task(tmp_path / "greeting")) == reward


def reward_after(command: str, task: Path) -> float | None:
    (row,) = read_tasks(str(task))
    text = json.dumps(row).replace("/tests/", "/program/tests/").replace(REWARDS, "/program/logs")
    row = json.loads(text) | {"folder": ".", "image": ""}
    kit, tools = open_workspace(row, sandbox="bubblewrap{image}", folder="{folder}")
    call(tools, "bash", command=command)
    reward = LOOP.run_until_complete(tools.reward())
    LOOP.run_until_complete(tools.close())
    LOOP.run_until_complete(kit.close())
    return reward


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("exit 1", 0.0),
        ("printf noise; echo 0.5 > /program/logs/reward.txt", 0.5),
        ("echo 1 > /program/logs/reward.txt; printf '{\n\"reward\":\n0.25}' > /program/logs/reward.json", 0.25),
        ("#!/usr/bin/env python3\nopen('/program/logs/reward.txt', 'w').write('0.75')", 0.75),
        ("sleep 60; echo 1 > /program/logs/reward.txt", 0.0),  # beyond verifier.timeout_sec
    ],
)
def test_the_reward_is_that_of_the_test_script(tmp_path: Path, script: str, reward: float) -> None:
    """The policy has written another, which does not count."""
    task = make_task(tmp_path / "greeting")
    (task / "task.toml").write_text(f"[verifier]\ntimeout_sec = {2.0 if 'sleep' in script else 60.0}\n")
    (task / "tests/test.sh").write_text(script)
    assert reward_after("mkdir logs; echo 1 > logs/reward.txt; echo 1 > logs/reward.json", task) == reward


def test_a_reward_is_the_last_line_that_the_tests_print() -> None:
    lines = ['{"reward": 0.25, "parts": 3}', "0.5\n", "12 passed\n1", "killed", "", "null", '{"speed": 1}']
    assert [read_number(line) for line in lines] == [0.25, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0]
