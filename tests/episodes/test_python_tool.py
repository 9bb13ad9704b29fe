"""Python with state over the turns of an episode, in the real sandbox."""

import asyncio
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from grpo_mp.rollout.protocol import ToolCall, ToolResult
from grpo_mp.rollout.python_tool import _sandboxes
from grpo_mp.rollout.tools import EpisodeTools, load_tools
from grpo_mp.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("sandbox")
PATH = "grpo_mp.rollout.python_tool:Python"
LOOP = asyncio.new_event_loop()  # one for all calls: worker processes belong to it


def run(tools: EpisodeTools, code: str) -> ToolResult:
    return LOOP.run_until_complete(tools.call(ToolCall("python", {"code": code})))


def test_names_live_through_an_episode_and_no_longer() -> None:
    kit = load_tools([PATH])
    first, second = (LOOP.run_until_complete(kit.open(20.0, 1000)) for _ in range(2))
    assert run(first, "import math\nx = 3\nprint('three')") == ToolResult("three")
    assert run(first, "x = x * 2\nmath.gcd(x, 9)") == ToolResult("3")
    assert run(first, "y = x / 0") == ToolResult("ZeroDivisionError: division by zero")
    assert run(first, "x") == ToolResult("6")
    assert run(second, "x") == ToolResult("NameError: name 'x' is not defined")


def test_what_takes_too_long_is_interrupted_and_what_ends_the_interpreter_is_told() -> None:
    tools = LOOP.run_until_complete(load_tools([PATH], arguments={PATH: {"timeout_s": 3.0}}).open(30.0, 1000))
    assert run(tools, "x = 1") == ToolResult("")
    assert run(tools, "while True: pass") == ToolResult("TimeoutError: the code took longer than 3 s")
    assert run(tools, "x") == ToolResult("1")
    held = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    for code in ("import os; os._exit(1)", held):
        assert run(tools, "x = 1") == ToolResult("")
        ended = run(tools, code)
        assert (ended.error, "names are lost" in ended.text) == ("raised", True)
        assert run(tools, "x") == ToolResult("NameError: name 'x' is not defined")


def test_an_interpreter_ends_with_its_episode() -> None:
    """With all that its code has started, which can be seen from outside."""
    kit = load_tools([PATH])
    tools = LOOP.run_until_complete(kit.open(30.0, 1000))
    before = children()
    run(tools, "import subprocess; subprocess.Popen(['sleep', '600'])")
    started = children() - before
    assert started
    LOOP.run_until_complete(tools.close())
    deadline = time.monotonic() + 120.0
    while started & children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not started & children()


def children() -> set[int]:
    """All processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_memory_is_limited_and_isolation_is_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = LOOP.run_until_complete(load_tools([PATH]).open(20.0, 1000))
    assert run(tools, "len(bytearray(2**29))") == ToolResult("MemoryError")
    with pytest.raises(UserError, match=r"rollout.tool_args: 'Python' is not in rollout.tools"):
        load_tools([PATH], arguments={"Python": {}})
    monkeypatch.setenv("PATH", "/nowhere")
    _sandboxes.cache_clear()
    with pytest.raises(UserError, match=r"Python: programs cannot be isolated by bubblewrap \(bwrap"):
        load_tools([PATH], arguments={PATH: {"timeout_s": 3.5}})


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
    tools = LOOP.run_until_complete(load_tools([PATH]).open(20.0, 1000))
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = SEARCH.format(places=places, address=server.getsockname())
        assert run(tools, code) == ToolResult("[]")
