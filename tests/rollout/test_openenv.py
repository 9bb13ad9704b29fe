"""Environments of OpenEnv: servers made with the package, where it is installed, and one that sends junk."""

import asyncio
import importlib.util
import json
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout import tool_processes
from grpo_mp.rollout.protocol import ToolCall, ToolResult
from grpo_mp.rollout.tool_processes import ToolError
from grpo_mp.rollout.tools import EpisodeTools, ToolKit, load_tools
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Sample
from tests.episode_page import read_example
from tests.episodes.test_chat import make_renderer
from tests.http_server import free_port, program_serving
from tests.rollout.engineless import TextClient, make_prompt, make_runner, roll_out
from tests.virtual_time import run_with_skips, skip

PATH = "grpo_mp.rollout.openenv:Environment"
needs_openenv = pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="openenv is not installed")
needs_websockets = pytest.mark.skipif(importlib.util.find_spec("websockets") is None, reason="websockets is missing")
LIMIT_S = 600.0
SERVER = """
import os, sys, time
from pathlib import Path
import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, CallToolAction, CallToolObservation, Environment, MCPEnvironment
from openenv.core.env_server import Observation, State, create_app

class Do(Action):
    "Do something."
    how: str

class Seen(Observation):
    text: str
    count: int

class Trouble(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, how="", **columns):
        self.count = 0
        if how:
            return self.step(Do(how=how))
        return Seen(text="begun", count=0, metadata=columns)

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        if action.how == "fails":
            raise ValueError("no way")
        if action.how == "floods":
            return Seen(text="x" * 10**5, count=self.count)
        if action.how == "floods more":
            return Seen(text="x" * 2**26, count=self.count)
        if action.how == "hangs":
            Path(sys.argv[2]).touch()
            time.sleep(3600)
        if action.how == "dies":
            os._exit(3)
        return Seen(text="done", count=self.count, reward=0.25)

class Notebook(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        self.lines = []
        server = FastMCP("notebook")

        @server.tool
        def note(line: str) -> str:
            "Write a line down."
            if not line:
                raise ValueError("an empty line")
            self.lines.append(line)
            return f"{len(self.lines)} lines"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **columns):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s)
        seen.reward = 0.5
        return seen

app = FastAPI()
app.mount("/trouble", create_app(Trouble, Do, Seen, max_concurrent_envs=2))
app.mount("/notebook", create_app(Notebook, CallToolAction, CallToolObservation, max_concurrent_envs=2))
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical", ws_ping_interval=0.1, ws_ping_timeout=3.0)
"""


def running(script: Path, *arguments: str, port: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return program_serving([sys.executable, str(script), *arguments], port)


def with_tools(work: Callable[[ToolKit], Awaitable[Any]], url: str) -> Any:
    async def run() -> Any:
        try:
            return await work(kit)
        finally:
            await kit.close()

    kit = load_tools([PATH], arguments={PATH: {"url": url}})
    return run_with_skips(run())


async def call(tools: EpisodeTools, name: str, **arguments: Any) -> ToolResult:
    return await tools.call(ToolCall(name, arguments))


@needs_openenv
def test_the_example_of_the_page_is_played(tmp_path: Path) -> None:
    settings = read_example("Environments of OpenEnv", tmp_path)["rollout"]
    port = free_port()
    script = tmp_path / "game_server.py"
    script.write_text(script.read_text().replace("8000", str(port)))
    settings["tool_args"][PATH]["url"] = f"http://127.0.0.1:{port}"
    seed = next(seed for seed in range(99) if random.Random(seed).randint(1, 9) == 7)
    numbers = (5, 8, 7, 7)
    texts = [f"[step]({json.dumps({'number': number})})<|im_end|>" for number in numbers] + ["Done.<|im_end|>"]
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, texts)
    with running(script, port=port):
        runner = make_runner(client, "call_tools", **settings | {"limits": {"tool_s": LIMIT_S}})
        sample = roll_out(runner, replace(make_prompt(runner), columns={"seed": seed}))
    assert (sample.error, sample.state, sample.episode_reward) == ("", "completed", 1.0)
    assert [sample.metrics[name] for name in ("turns", "tool_calls", "tool_raised")] == [5, 4, 1]
    decode = client.tokenizer.decode
    assert "How many?\nGuess my number, 1 to 9.<|im_end|>" in decode(sample.prompt_tokens)
    assert "'number'" in decode(sample.prompt_tokens).replace('"', "'")  # the schema of `step`
    parts = [(token, own) for token, own in zip(sample.tokens, sample.generated, strict=True)]
    assert decode([token for token, own in parts if own]) == "".join(texts)
    given = decode([token for token, own in parts if not own])
    answers = ["more", "less", "right\nThe episode is over.", "Error: ToolCallError: the environment's episode is over"]
    places = [given.index(answer) for answer in answers]
    assert places == sorted(places)
    assert {one for (_, own), one in zip(parts, sample.rollout_logprobs, strict=True) if not own} == {0.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a running server, and a file that it makes when it hangs."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "server.py").write_text(SERVER)
    port = free_port()
    with running(folder / "server.py", str(port), str(folder / "hangs"), port=port):
        yield f"http://127.0.0.1:{port}", folder / "hangs"


@needs_openenv
def test_mcp_tools_of_an_environment_are_called(served: tuple[str, Path]) -> None:
    async def note(kit: ToolKit) -> None:
        assert [schema["function"]["name"] for schema in kit.schemas] == ["note"]
        tools = await kit.open(LIMIT_S, 100)
        assert await tools.reset({}) == ""
        assert [await call(tools, "note", line="a") for _ in range(2)] == [ToolResult("1 lines"), ToolResult("2 lines")]
        failed = ToolResult("Error: ToolCallError: Error calling tool 'note': an empty line", "raised")
        assert await call(tools, "note", line="") == failed
        assert await tools.reward() == 1.5
        await tools.close()
        others = [await open_session(kit) for _ in range(2)]  # a session that ends makes place for another
        for other in others:
            await other.close()

    async def open_session(kit: ToolKit) -> EpisodeTools:
        for _ in range(100):
            tools = await kit.open(LIMIT_S, 100)
            with suppress(ToolError):
                await tools.reset({})
                return tools
            await tools.close()
        raise AssertionError("the server accepts no session")

    with_tools(note, served[0] + "/notebook")


@needs_openenv
def test_trouble_of_an_environment_is_bounded(served: tuple[str, Path]) -> None:
    async def trouble(kit: ToolKit) -> None:
        (schema,) = [schema["function"] for schema in kit.schemas]
        assert (schema["name"], schema["description"]) == ("step", "Do something.")
        assert (list(schema["parameters"]["properties"]), schema["parameters"]["required"]) == (["how"], ["how"])
        first, second, third = [await kit.open(LIMIT_S, 300) for _ in range(3)]
        assert await first.reset({"text": "no parameter", "list": [1]}) == '\n{"text": "begun", "count": 0}'
        await second.reset({})
        with pytest.raises(ToolError, match="is lost: ConnectionError: Server at capacity"):
            await third.reset({})
        await third.close()
        done = [ToolResult(json.dumps({"text": "done", "count": count})) for count in (1, 3)]
        assert await call(first, "step", how="") == done[0]
        await asyncio.sleep(3.5)  # pings are answered while nobody calls
        assert await call(first, "step", how="fails") == ToolResult("Error: ToolCallError: no way", "raised")
        assert await call(first, "step", how="") == done[1]
        wrong = ToolResult("Error: ToolCallError: Invalid message; how: Field required", "raised")
        assert await call(first, "step") == wrong
        assert (await call(first, "step", how="floods")).text.endswith("x... (99724 characters left out)")
        assert await first.reward() == 0.5
        lost = await call(first, "step", how="floods more")
        assert "is lost: ConnectionClosedError: sent 1009 (message too big)" in lost.text
        assert await call(first, "step", how="") == lost
        with pytest.raises(ToolError, match="message too big"):
            await first.reward()
        await first.close()

        hanging = asyncio.create_task(call(second, "step", how="hangs"))
        while not served[1].exists():
            await asyncio.sleep(0.02)
        skip(LIMIT_S)
        assert (await hanging).error == "timeout"
        with pytest.raises(ToolError, match="its process was ended with a call that took too long"):
            await second.reward()
        await second.close()

    with_tools(trouble, served[0] + "/trouble/")


@needs_openenv
def test_episodes_connect_to_a_server_that_runs_again(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    settings = {"tool_args": {PATH: {"url": f"http://127.0.0.1:{port}/trouble"}}, "tool_parser": "qwen25"}
    texts = ['[step]({"how": "dies"})<|im_end|>', "Done.<|im_end|>"]
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, texts)

    def play(how: str) -> Sample:
        runner = make_runner(client, "call_tools", tools=[PATH], **settings)
        return roll_out(runner, replace(make_prompt(runner), columns={"how": how}))

    with running(tmp_path / "server.py", str(port), port=port):
        flooded = play("floods")
        assert (flooded.state, flooded.error, len(flooded.tokens)) == ("truncated", "", 1)
        died = play("")
        assert (died.state, died.metrics["turns"]) == ("error", 2)
        assert f"the session with http://127.0.0.1:{port}/trouble is lost: ConnectionClosedError" in died.error
    with running(tmp_path / "server.py", str(port), port=port):
        client.texts = texts[1:]
        again = play("ends well")
        assert (again.error, again.episode_reward) == ("", 0.0)


SCHEMA = {"action": {"title": "Do", "properties": {"how": {"type": "string"}, "metadata": {}}}}
EMPTY = {"type": "observation", "data": {"observation": {}}}
JUNK = {
    "no JSON": (["no JSON"], "JSONDecodeError"),
    "no message": (["[]"], "TypeError"),
    "a reward that is no number": (['{"type": "", "data": {"observation": {}, "reward": "1"}}'], "no observation with"),
    "a reward without limits": (['{"type": "", "data": {"observation": {}, "reward": NaN}}'], "no observation with"),
    "an observation that is none": (['{"type": "observation", "data": {"observation": []}}'], "no observation with"),
    "more than was asked for": ([json.dumps(EMPTY)] * 2, "a message that was not asked for"),
}


@needs_websockets
def test_an_episode_fails_whose_server_sends_junk() -> None:
    from websockets.http11 import Response
    from websockets.sync.server import serve

    sent = threading.Event()

    def answer(connection: Any) -> None:
        connection.recv()
        connection.send(json.dumps(EMPTY))
        kind = json.loads(connection.recv())["data"]["how"]
        for message in JUNK[kind][0]:
            connection.send(message)
        sent.set()
        with suppress(Exception):
            connection.recv()

    def describe(_: Any, request: Any) -> Response | None:
        body = json.dumps(SCHEMA).encode()
        return None if request.path == "/ws" else Response(200, "", type(request.headers)(), body)

    async def play(kit: ToolKit) -> None:
        for kind, (messages, reason) in JUNK.items():
            sent.clear()
            tools = await kit.open(LIMIT_S, 200)
            assert await tools.reset({}) == ""
            results = [await call(tools, "step", how=kind)]
            sent.wait()
            results.append(await call(tools, "step", how=kind))
            assert reason in results[-1].text
            assert (len(messages) == 2) == (results[0] == ToolResult(""))
            with pytest.raises(ToolError, match=r"ConnectionLostError: the session with .* is lost"):
                await tools.reward()
            await tools.close()

    with serve(answer, "127.0.0.1", 0, process_request=describe) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with_tools(play, f"http://127.0.0.1:{server.socket.getsockname()[1]}")
    thread.join()


@needs_websockets
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("HOST:8000", "url is 'HOST:8000': set the address of a server"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer as a server of OpenEnv: ConnectError"),
        ("http://host.invalid", "http://host.invalid does not answer as a server of OpenEnv: ConnectError"),
    ],
)
def test_an_address_without_a_server_is_refused(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_processes, "LISTING_LIMIT_S", LIMIT_S)
    with pytest.raises(UserError) as refused:
        load_tools([PATH], arguments={PATH: {"url": url}})
    assert str(refused.value).startswith("rollout.tool")
    assert message in str(refused.value)


def test_a_missing_package_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(UserError, match=r"^rollout\.tool_args .*: the package is missing .*: pip install websockets"):
        load_tools([PATH], arguments={PATH: {"url": "http://127.0.0.1:1"}})
