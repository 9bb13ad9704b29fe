"""Tasks of NeMo-Gym: an example server and its rows from the package, where it is installed, and one that fails."""

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.data.rows import read_rows
from grpo_mp.rollout.nemo_gym import read_tasks
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Sample
from tests.episode_page import read_example
from tests.episodes.test_chat import make_renderer
from tests.http_server import free_port, program_serving
from tests.rollout.engineless import TextClient, make_prompt, make_runner, roll_out

FUNCTION = "grpo_mp.rollout.nemo_gym:Resources"
ROWS = "resources_servers/example_session_state_mgmt/data/example.jsonl"
# The package asks for the version of Ray, which only its launcher uses. It moves the folder in which it is installed to
# the end of sys.path, behind other versions of the first two packages.
SERVER = """
import importlib.metadata, sys
import antlr4, openai, uvicorn

version = importlib.metadata.version
importlib.metadata.version = lambda name: "2.58.0" if name == "ray" else version(name)

from unittest.mock import MagicMock
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt import app

port = int(sys.argv[1])
config = app.StatefulCounterResourcesServerConfig(host="127.0.0.1", port=port, entrypoint="", name="counter")
server = app.StatefulCounterResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), port=port, log_level="critical")
"""
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
            {"role": "user", "content": "One?"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
    },
    "level": 3,
}


def play(url: str, columns: dict[str, Any], texts: list[str], **arguments: Any) -> tuple[Sample, TextClient]:
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, [f"{text}<|im_end|>" for text in texts])
    runner = make_runner(client, FUNCTION, function_args={"url": url, **arguments}, tool_parser="qwen25")
    return roll_out(runner, replace(make_prompt(runner), columns=columns)), client


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    with program_serving([sys.executable, str(tmp_path / "server.py"), str(port)], port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.skipif(importlib.util.find_spec("nemo_gym") is None, reason="the package nemo-gym is not installed")
def test_an_example_of_the_package_is_played(counter: str) -> None:
    package = importlib.util.find_spec("nemo_gym")
    assert package
    assert package.origin
    rows = [
        row.columns
        for row in read_rows(str(Path(package.origin).parents[1] / ROWS), f"{read_tasks.__module__}:read_tasks")
    ]
    assert rows[0]["prompt"] == [{"role": "user", "content": "add 1 then add 2 then get the count"}]
    calls = ['[increment_counter]({"count": 1})', '[increment_counter]({"count": 2})', "[get_counter_value]({})"]
    sample, client = play(counter, rows[0], [*calls, "6."])
    assert (sample.error, sample.state, sample.episode_reward) == ("", "completed", 1.0)
    assert [sample.metrics[name] for name in ("turns", "tool_calls", "tool_raised", "forks")] == [4, 3, 0, 0]
    decode = client.tokenizer.decode
    assert "increment_counter" in decode(sample.prompt_tokens)  # the schemas of the row
    own = [token for token, generated in zip(sample.tokens, sample.generated, strict=True) if generated]
    given = [token for token, generated in zip(sample.tokens, sample.generated, strict=True) if not generated]
    assert decode(own) == "".join(text + "<|im_end|>" for text in [*calls, "6."])
    assert decode(given).count('{"success":true}') == 2
    assert '{"count":6}' in decode(given)
    wrong = ['[increment_counter]({"count": "x"})', "[verify]({})", "7."]
    other, client = play(counter, rows[0], wrong)  # a session of its own
    assert (other.error, other.episode_reward, other.metrics["tool_raised"]) == ("", 0.0, 2)
    assert "Error: /increment_counter gave status 422" in client.tokenizer.decode(client.prompts[1])
    assert "Error: there is no tool verify" in client.tokenizer.decode(client.prompts[2])


@pytest.fixture
def faulty() -> Iterator[ThreadingHTTPServer]:
    """A server with the attributes `replies`, texts or None by path, `asked`, requests by path, and `hangs`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked[self.path] = body  # type: ignore[attr-defined]
            if self.path == server.hangs:  # type: ignore[attr-defined]
                time.sleep(2.0)
            text = server.replies.get(self.path, "{}")  # type: ignore[attr-defined]
            if text is None:
                return
            reply = text.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(reply)

        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        for name, value in {"replies": {}, "asked": {}, "hangs": ""}.items():
            setattr(server, name, value)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_verify_gets_the_row_and_what_the_policy_did(faulty: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (row,) = read_tasks(str(tmp_path / "rows.jsonl"))
    assert row["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "One?"}]
    faulty.replies = {"/verify": '{"reward": 0.5}', "/add": "2"}
    sample, _ = play(f"http://127.0.0.1:{faulty.server_port}", row, ['Hm.[add]({"to": 1})', "2."])
    assert (sample.error, sample.episode_reward) == ("", 0.5)
    assert faulty.asked["/seed_session"] == ROW
    assert faulty.asked["/add"] == {"to": 1}
    response = faulty.asked["/verify"].pop("response")
    assert faulty.asked["/verify"] == ROW
    said, call, result, last = response["output"]
    assert [said["content"][0]["text"], last["content"][0]["text"]] == ["Hm.", "2."]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"to": 1})
    assert (result["call_id"], result["output"]) == (call["call_id"], "2")
    assert (response["status"], response["tools"]) == ("completed", ROW["responses_create_params"]["tools"])


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ({"/verify": "[]"}, "/verify gave no valid reward: []"),
        ({"/verify": "no JSON"}, "JSONDecodeError"),
        ({"/verify": '{"reward": "1"}'}, "a reward is a finite number"),
        ({"/verify": '{"reward": NaN}'}, "a reward is a finite number"),
        ({"/verify": '{"reward": 1, "mask_sample": true}'}, "/verify gave no valid reward"),
        ({"/add": "x" * (2**26 + 1)}, "/add gave more than 67108864 bytes"),
    ],
)
def test_an_episode_fails_whose_server_sends_junk(faulty: Any, replies: dict[str, str], error: str) -> None:
    faulty.replies = {"/verify": '{"reward": 0.5}', **replies}
    sample, _ = play(f"http://127.0.0.1:{faulty.server_port}", ROW, ["[add]({})", "2."])
    assert sample.state == "error"
    assert error in sample.error


def test_calls_that_hang_flood_or_meet_no_server_are_bounded(faulty: Any) -> None:
    url = f"http://127.0.0.1:{faulty.server_port}"
    faulty.replies = {"/verify": '{"reward": 0.5}'}
    faulty.hangs = "/add"
    sample, client = play(url, ROW, ["[add]({})", "2."], tool_s=0.3)
    assert (sample.error, sample.episode_reward, sample.metrics["tool_timeout"]) == ("", 0.5, 1)
    assert "Error: add took longer than 0.3 s" in client.tokenizer.decode(client.prompts[1])
    faulty.hangs = ""
    faulty.replies["/add"] = "x" * 10**5
    sample, _ = play(url, ROW, ["[add]({})", "2."])
    assert (sample.state, sample.episode_reward) == ("truncated", 0.5)
    assert faulty.asked["/verify"]["response"]["status"] == "incomplete"
    faulty.replies["/seed_session"] = None
    sample, _ = play(url, ROW, ["2."])
    assert f"ConnectionError: the resources server {url} is lost: RemoteProtocolError" in sample.error


def test_bad_settings_and_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set the address of a resources server"):
        play("HOST", ROW, [])
    with pytest.raises(
        UserError, match=r"^rollout\.function_args: no resources server answers at http://127\.0\.0\.1:1: Con"
    ):
        play("http://127.0.0.1:1", ROW, [])
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(ROW) + '\n{"responses_create_params": {"input": [{"role": "user"}]}}\n'
    )
    with pytest.raises(
        UserError, match=r"rows.jsonl, line 2: responses_create_params.input is no text and no messages"
    ):
        list(read_tasks(str(tmp_path / "rows.jsonl")))


def test_the_example_of_the_page_names_the_reader(tmp_path: Path) -> None:
    settings = read_example("Tasks of NeMo-Gym", tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    rows = read_rows(str(tmp_path / "rows.jsonl"), settings["data"]["source"])
    assert settings["data"]["prompt_column"] in rows[0].columns
    assert settings["rollout"]["function"] == FUNCTION
