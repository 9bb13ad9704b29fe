"""Tools of MCP servers, where the package mcp is installed: servers made with FastMCP, and programs that are none."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout import tool_processes
from grpo_mp.rollout.protocol import ToolCall, ToolResult
from grpo_mp.rollout.tools import EpisodeTools, ToolKit, load_tools
from grpo_mp.utils.errors import UserError
from tests.episode_page import read_example
from tests.episodes.test_chat import make_renderer
from tests.episodes.test_tools import has_ended
from tests.http_server import free_port, program_serving
from tests.rollout.engineless import TextClient, make_runner, roll_out
from tests.virtual_time import run_with_skips, skip

PATH = "grpo_mp.rollout.mcp_tools:Server"
needs_mcp = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed")
LIMIT_S = 600.0
SERVER = """
import os, sys, time
from mcp.server.fastmcp import Context, FastMCP, Image

folder, *port = sys.argv[1:]
open(f"{folder}/{os.getpid()}", "w").close()
server = FastMCP("test", port=int(*port or [8000]))
lines = []

@server.tool()
def note(line: str) -> str:
    "Write a line down."
    lines.append(line)
    return f"{len(lines)} lines"

@server.tool()
def get_reward(how: str) -> str:
    if how == "fails":
        raise ValueError("no\\nway")
    if how == "floods":
        print("x" * 10**5, file=sys.stderr)
        return "x" * 10**6
    if how == "junk":
        print("no message", flush=True)
        return os.environ.get("WANDB_API_KEY", "no key")
    if how == "crashes":
        os._exit(3)
    open(f"{folder}/hangs", "w").close()
    time.sleep(3600)

@server.tool()
def image() -> Image:
    return Image(data=b"none", format="png")

@server.tool()
def authorization(context: Context) -> str:
    return context.request_context.request.headers["Authorization"]

server.run("streamable-http" if port else "stdio")
"""
# A server of its own lines, whose answer to a call is not what the protocol asks for.
MALFORMED = """
import json, sys

capable = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
tools = [{"name": "say", "inputSchema": {"type": "object"}}] if sys.argv[1] == "lists" else [{"name": 1}]
for line in sys.stdin:
    asked = json.loads(line)
    results = {"initialize": capable, "tools/list": {"tools": tools}}
    if asked["method"] == "tools/call":
        results["tools/call"] = json.loads(asked["params"]["arguments"]["result"])
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]}), flush=True)
"""
OWNER = f"""
import asyncio, sys
from grpo_mp.rollout.protocol import ToolCall
from grpo_mp.rollout.tools import load_tools

async def play():
    tools = await kit.open(600.0, 100)
    print((await tools.call(ToolCall("note", {{"line": "a"}}))).text, flush=True)
    await asyncio.sleep(3600)

kit = load_tools(["{PATH}"], arguments={{"{PATH}": {{"command": sys.argv[1:]}}}})
asyncio.run(play())
"""


def with_tools(work: Callable[[ToolKit], Awaitable[Any]], variables: Sequence[str] = (), **arguments: Any) -> Any:
    async def run() -> Any:
        try:
            return await work(kit)
        finally:
            await kit.close()

    kit = load_tools([PATH], arguments={PATH: arguments}, variables=variables)
    return run_with_skips(run())


async def call(tools: EpisodeTools, name: str, **arguments: Any) -> ToolResult:
    return await tools.call(ToolCall(name, arguments))


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    (tmp_path / "pids").mkdir()
    return str(path)


@needs_mcp
def test_a_server_is_a_process_of_its_episode(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    folder = tmp_path / "pids"

    async def play(kit: ToolKit) -> None:
        note, *_ = [schema["function"] for schema in kit.schemas]
        assert (note["name"], note["description"]) == ("note", "Write a line down.")
        assert note["parameters"]["properties"]["line"]["type"] == "string"
        first, second = [await kit.open(LIMIT_S, 100) for _ in range(2)]
        assert await first.reward() is None
        assert [await call(first, "note", line="a") for _ in range(2)] == [ToolResult("1 lines"), ToolResult("2 lines")]
        assert await call(second, "note", line="a") == ToolResult("1 lines")
        failure = "Error: ToolCallError: Error executing tool get_reward: no way"
        assert await call(first, "get_reward", how="fails") == ToolResult(failure, "raised")
        flood = ToolResult("x" * 100 + "... (999900 characters left out)")
        assert await call(first, "get_reward", how="floods") == flood
        assert await call(first, "get_reward", how="junk") == ToolResult("no key")
        assert await call(first, "image") == ToolResult("(image/png left out)")
        assert "validation error" in (await call(first, "note")).text
        crash = ToolResult("Error: ConnectionLostError: the server has ended or closed the connection", "raised")
        assert await call(first, "get_reward", how="crashes") == crash
        assert await call(first, "note", line="b") == ToolResult("1 lines")
        await first.close()
        assert len([pid for pid in os.listdir(folder) if Path("/proc", pid).exists()]) == 1  # the second's

        hanging = asyncio.create_task(call(second, "get_reward", how="hangs"))
        while not (folder / "hangs").exists():
            await asyncio.sleep(0.02)
        skip(LIMIT_S)
        assert (await hanging).error == "timeout"
        assert "its process was ended with a call that took too long" in (await call(second, "note", line="c")).text
        await second.close()

    with_tools(play, command=[sys.executable, script, str(folder)])
    (folder / "hangs").unlink()
    pids = os.listdir(folder)
    assert len(pids) == 4  # one to list the tools, three of the episodes
    assert all(map(has_ended, pids))
    assert capfd.readouterr().err == ""


@pytest.fixture
def served(script: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, script, str(tmp_path / "pids"), str(port)]
    with program_serving(command, port, stderr=subprocess.DEVNULL) as process:
        yield process, f"http://127.0.0.1:{port}/mcp"


@needs_mcp
def test_a_server_at_a_url_is_called_by_all_episodes(served: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = served

    async def play(kit: ToolKit) -> None:
        first, second = [await kit.open(LIMIT_S, 300) for _ in range(2)]
        assert await call(first, "note", line="a") == ToolResult("1 lines")
        assert await call(second, "note", line="a") == ToolResult("2 lines")
        await second.close()
        process.send_signal(signal.SIGKILL)
        process.wait()
        lost = await call(first, "note", line="a")
        assert (lost.error, lost.text.partition(": ")[2][:19]) == ("raised", "ConnectionLostError")
        again = await call(first, "note", line="a")
        assert again.text.startswith(f"Error: the MCP server {url} does not start or answer: ConnectError: ")
        await first.close()

    with_tools(play, url=url)


@needs_mcp
def test_headers_have_variables_of_the_tools_environment(
    served: tuple[subprocess.Popen[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(kit: ToolKit) -> None:
        tools = await kit.open(LIMIT_S, 100)
        assert await call(tools, "authorization") == ToolResult("Bearer a$b")
        await tools.close()

    monkeypatch.setenv("SEARCH_KEY", "a$b")
    headers = {"Authorization": "Bearer ${SEARCH_KEY}"}
    with_tools(ask, ["SEARCH_KEY"], url=served[1], headers=headers)
    with pytest.raises(UserError, match=r"set \$SEARCH_KEY, and name it in rollout\.tool_environment"):
        with_tools(ask, url=served[1], headers=headers)  # the run has it, but not the tool's process


@needs_mcp
def test_a_malformed_reply_is_an_error_of_the_call(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MALFORMED)

    async def play(kit: ToolKit) -> None:
        tools = await kit.open(LIMIT_S, 200)
        for result in ('{"content": "x"}', '{"content": [{"type": "say"}]}', "{}"):
            reply = await call(tools, "say", result=result)
            assert (reply.error, reply.text.partition(": ")[2][:15]) == ("raised", "ValidationError")
        assert await call(tools, "say", result='{"content": [{"type": "text", "text": "x"}]}') == ToolResult("x")
        unread = asyncio.create_task(call(tools, "say", result="[]"))  # no message: it is awaited until the limit
        await asyncio.sleep(0.5)
        skip(LIMIT_S)
        assert (await unread).error == "timeout"
        await tools.close()

    with_tools(play, command=[sys.executable, str(tmp_path / "server.py"), "lists"])
    with pytest.raises(UserError, match=r"^rollout\.tools .*: ValidationError"):
        load_tools([PATH], arguments={PATH: {"command": [sys.executable, str(tmp_path / "server.py"), ""]}})


@needs_mcp
def test_a_server_ends_with_a_killed_rank(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, sys.executable, script, str(tmp_path / "pids")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "1 lines\n"
        owner.kill()
    assert len(pids := os.listdir(tmp_path / "pids")) == 2  # one to list the tools
    assert all(map(has_ended, pids))


@needs_mcp
def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_example("Tools of an MCP server", tmp_path)["rollout"]
    monkeypatch.chdir(tmp_path)
    settings["tool_args"][PATH]["command"][0] = sys.executable
    texts = [f"[note]({json.dumps({'line': 'x'})})<|im_end|>", "[erase]({})<|im_end|>", "Done.<|im_end|>"]
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, texts)
    sample = roll_out(make_runner(client, "call_tools", **settings | {"limits": {"tool_s": LIMIT_S}}))
    assert sample.error == ""
    assert [sample.metrics[name] for name in ("turns", "tool_calls", "tool_raised")] == [3, 2, 1]
    assert "Write a line down." in client.tokenizer.decode(client.prompts[0])
    assert "1 lines" in client.tokenizer.decode(client.prompts[1])


@needs_mcp
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "set either command, a list of words, or url"),
        ({"command": "python server.py"}, "set either command, a list of words, or url"),
        ({"command": ["true"], "parallel": 0}, "parallel is 0: set a number of calls, 1 or more"),
        ({"url": "http://127.0.0.1:1/mcp", "headers": {"X": "$NO_SUCH"}}, "headers: set $NO_SUCH, and name it in"),
        ({"command": ["no-such-server"]}, "`no-such-server` does not start or answer: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "import sys; sys.exit('no licence')"]}, "; it wrote: no licence"),
        ({"command": ["sleep", "600"]}, "Server took longer than 3 s"),
    ],
)
def test_a_server_that_does_not_start_is_refused(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_processes, "LISTING_LIMIT_S", 3.0 if "sleep" in arguments.get("command", ()) else LIMIT_S)
    with pytest.raises(UserError) as refused:
        load_tools([PATH], arguments={PATH: arguments})
    assert message in str(refused.value)
    assert str(refused.value).startswith("rollout.tool")


def test_a_missing_package_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.client.stdio", None)
    with pytest.raises(UserError, match=r"^rollout\.tool_args .*: the package is missing here .*: pip install 'mcp>="):
        load_tools([PATH], arguments={PATH: {"url": "http://127.0.0.1:1/mcp"}})
