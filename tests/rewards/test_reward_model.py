"""The reward model's client against a real HTTP server that answers in the shape of SGLang's /classify."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grpo_mp.errors import UserError
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.types import SampleGroup

MakeGroup = Callable[..., SampleGroup]


class Server(ThreadingHTTPServer):
    """Scores a sequence with the sum of its ids; `failures` are answered first: (status, body) or a delay in s."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.failures: list[tuple[int, str] | float] = []
        self.bodies: list[Any] = []
        self.paths: set[str] = set()

    def handle_error(self, *_: Any) -> None:
        """A client that gave up waiting is no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.paths.add(self.path)
        failure = self.server.failures.pop(0) if self.server.failures else 0.0
        if isinstance(failure, tuple):
            return self.reply(*failure)
        time.sleep(failure)
        self.reply(200, json.dumps([{"embedding": [float(sum(ids))], "meta_info": {}} for ids in body["input_ids"]]))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def score(url: str, group: SampleGroup, on_error: float | str = "stop", **model: Any) -> list[float]:
    settings = RewardConfig.model_validate({"model": {"url": url, **model}, "on_error": on_error})
    scorer = Scorer(settings, max_response_tokens=10)
    try:
        assert [*scorer.term_weights] == ["model"]
        return [sample.reward for sample in scorer.score_group(group).samples]
    finally:
        scorer.close()


def test_whole_sequences_go_out_in_one_call(server: Server, make_group: MakeGroup) -> None:
    assert score(server.url, make_group(["a", "bc"]), weight=0.5) == [50.0, 100.0]
    assert server.bodies == [{"input_ids": [[1, 2, 97], [1, 2, 98, 99]]}]
    assert server.paths == {"/classify"}


def test_a_proxy_of_the_environment_is_not_asked(
    server: Server, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert score(f"{server.url}/", make_group(["a"])) == [100.0]


@pytest.mark.parametrize("failure", [(500, "busy"), (503, ""), (429, "slow down"), 0.6])
def test_transient_failures_are_retried(failure: Any, server: Server, make_group: MakeGroup) -> None:
    server.failures = [failure, failure]
    assert score(server.url, make_group(["a"]), retries=2, timeout_s=0.3) == [100.0]
    assert len(server.bodies) == 3


ENTRY = {"embedding": [1.0], "meta_info": {}}
FAILURES: list[tuple[Any, int, str]] = [
    ((500, "out of memory"), 2, r"/classify answered status 500: out of memory"),
    (
        (400, '{"error": {"message": "too long"}}'),
        1,
        r'/classify answered status 400: {"error": {"message": "too long"}}',
    ),
    (0.6, 2, r"/classify gave no answer \(ReadTimeout: timed out\)"),
    ((200, '[{"embedding": [NaN]}, {"embedding": [1.0]}]'), 1, r"returned nan, which is not finite"),
    ((200, json.dumps([ENTRY])), 1, r"returned 1 values for 2 samples"),
    ((200, json.dumps([ENTRY, {"embedding": [1.0, 2.0]}])), 1, r"not one score per sequence: serve a model with one"),
    ((200, json.dumps([{"text": "hello"}] * 2)), 1, r"not one score per sequence"),
    ((200, json.dumps(ENTRY)), 1, r"not one score per sequence"),
    ((200, json.dumps([{"embedding": [None]}] * 2)), 1, r"not one score per sequence"),
    ((200, "hello"), 1, r"answered 'hello', not one score per sequence"),
]


@pytest.mark.parametrize(("failure", "calls", "sentence"), FAILURES)
def test_broken_answers(failure: Any, calls: int, sentence: str, server: Server, make_group: MakeGroup) -> None:
    group = make_group(["a", "b"])
    server.failures = [failure] * calls
    with pytest.raises(UserError, match=rf"^reward model: prompt 12: .*{sentence}") as raised:
        score(server.url, group, retries=1, timeout_s=0.3)
    assert len(server.bodies) == calls
    assert "\n" not in str(raised.value)
    server.failures = [failure] * calls
    assert score(server.url, group, on_error=-2.0, retries=1, timeout_s=0.3) == [-2.0, -2.0]


def test_a_server_that_is_down(server: Server, make_group: MakeGroup) -> None:
    server.server_close()
    with pytest.raises(UserError, match=rf"{server.url}/classify gave no answer \(\w+Error: "):
        score(server.url, make_group(["a"]), retries=0)


@pytest.mark.parametrize("section", ["model", "steps"])
def test_a_missing_key_is_reported(section: str) -> None:
    settings = {section: {"url": "http://127.0.0.1:1", "api_key_env": "NO_SUCH_KEY"}}
    with pytest.raises(UserError, match=rf"^reward.{section}.api_key_env: NO_SUCH_KEY is not set in the environment"):
        Scorer(RewardConfig.model_validate(settings), 16, decode=str)
