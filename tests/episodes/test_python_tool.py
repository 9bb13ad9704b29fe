"""Python with state over the turns of an episode, in the real sandbox."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from grpo_mp.episodes.protocol import ToolCall, ToolResult
from grpo_mp.episodes.python_tool import Python
from grpo_mp.episodes.tools import EpisodeTools, load_tools
from grpo_mp.errors import UserError
from grpo_mp.rewards.sandbox import Sandbox
from grpo_mp.rewards.settings import CodeConfig

PATH = "grpo_mp.episodes.python_tool:Python"


@pytest.fixture(scope="module", autouse=True)
def isolation() -> None:
    try:
        Sandbox(CodeConfig())
    except UserError as error:
        pytest.skip(str(error))


def run(tools: EpisodeTools, code: str) -> ToolResult:
    return asyncio.run(tools.call(ToolCall("python", {"code": code})))


def test_names_live_through_an_episode_and_no_longer() -> None:
    kit = load_tools([PATH])
    first, second = (asyncio.run(kit.open(20.0, 1000)) for _ in range(2))
    assert run(first, "import math\nx = 3\nprint('three')") == ToolResult("three")
    assert run(first, "x = x * 2\nmath.gcd(x, 9)") == ToolResult("3")
    assert run(first, "y = x / 0") == ToolResult("ZeroDivisionError: division by zero")
    assert run(first, "x") == ToolResult("6")
    assert run(second, "x") == ToolResult("NameError: name 'x' is not defined")


def test_what_ends_a_program_is_told_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.episodes.python_tool.sandbox_settings", lambda: CodeConfig(timeout_s=2.0))
    tools = asyncio.run(load_tools([PATH]).open(30.0, 1000))
    assert run(tools, "x = 1") == ToolResult("")
    assert "the code was ended" in run(tools, "while True: pass").text
    assert "the code was ended" in run(tools, "import os; os._exit(1)").text
    assert run(tools, "x") == ToolResult("1")


SEARCH = """
import os, socket
found = [variable for variable, value in os.environ.items() if "hunter2" in value]
for place in {places!r}:
    try:
        found.append(open(place).read())
    except OSError:
        pass
try:
    socket.create_connection({address!r}, timeout=2)
    found.append("network")
except OSError:
    pass
print(found)
"""


def test_code_finds_neither_the_run_nor_secrets_nor_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    (tmp_path / "settings.yaml").write_text("run")
    tmp_path.chmod(0o755)
    places = [str(tmp_path / "settings.yaml"), "/proc/self/environ", f"/proc/{os.getpid()}/environ", "/etc/passwd"]
    tools = asyncio.run(load_tools([PATH]).open(20.0, 1000))
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = SEARCH.format(places=places, address=server.getsockname())
        assert run(tools, code) == ToolResult("[]")


def test_the_schema_is_of_the_method() -> None:
    (schema,) = load_tools([PATH]).schemas
    assert (schema["function"]["name"], list(schema["function"]["parameters"]["properties"])) == ("python", ["code"])
    assert Python()._cells == []
