"""Keys of servers: what is sent, what is refused at the start, and that no sentence shows one. Every user of keys."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import httpx
import pytest

from grpo_mp.algorithms.distillation_settings import TeacherConfig
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.teacher import TeacherClient
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.redact import without_secrets
from grpo_mp.utils.types import SampleGroup
from tests.http_server import JsonServer, Reply, chat_reply

MakeGroup = Callable[..., SampleGroup]
VARIABLE, KEY = "SOME_KEY", "sk-SECRET-0815"


class Server(JsonServer):
    """Answers judges, reward models and teachers; keeps what it was sent as Authorization."""

    def __init__(self) -> None:
        super().__init__()
        self.authorizations: list[str | None] = []

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        self.authorizations.append(headers.get("Authorization"))
        if path == "/chat/completions":
            return 200, chat_reply("Score: 5")
        if path == "/classify":
            return 200, json.dumps([{"embedding": [1.0]} for _ in body["input_ids"]])
        tables = [[[None, 0], *([-1.0, token] for token in ids[2:])] for ids in body.get("input_ids", ())]
        return 200, json.dumps([{"meta_info": {"input_token_logprobs": table}} for table in tables])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server().serving() as server:
        yield server


def score_with(section: str, where: Mapping[str, Any], group: SampleGroup | None) -> str:
    """Open the client; ask it once for a group."""
    own = {"model": "m"} if section == "judge" else {}
    settings = RewardConfig.model_validate({section: {**where, **own, "retries": 0}})
    return ask(Scorer(settings, 10, decode=lambda tokens: "".join(map(chr, tokens))), group)


def ask_teacher(where: Mapping[str, Any], group: SampleGroup | None) -> str:
    return ask(TeacherClient(TeacherConfig.model_validate({**where, "retries": 0})), group)


def ask(client: Scorer | TeacherClient, group: SampleGroup | None) -> str:
    with closing(client):
        try:
            if group:
                client.score_group(group)
        except UserError as error:
            return str(error)
    return ""


# By section: takes address and key, raises UserError for those at the start, returns what failed in asking for a group.
USERS: dict[str, Callable[[Mapping[str, Any], SampleGroup | None], str]] = {
    "reward.judge": lambda where, group: score_with("judge", where, group),
    "reward.model": lambda where, group: score_with("model", where, group),
    "reward.steps": lambda where, group: score_with("steps", where, group),
    "algorithm.distillation.teacher": ask_teacher,
}


@pytest.mark.parametrize("section", USERS)
@pytest.mark.parametrize("held", [KEY, f"{KEY}\n", f"{KEY}\r\n", f" \t{KEY}\r"])
def test_blanks_around_a_key_are_not_of_it(
    held: str, section: str, server: Server, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, held)
    assert USERS[section]({"url": server.url, "api_key_env": VARIABLE}, make_group(["ab"])) == ""
    assert server.authorizations == [f"Bearer {KEY}"]


@pytest.mark.parametrize("section", USERS)
@pytest.mark.parametrize("held", ["sk-SECRET\r-0815", "sk SECRET", "sk-SECRET\x07", "sk-SECRET-é", "\ufeffsk-SECRET"])
def test_what_is_no_key_is_refused_at_the_start_by_its_variable(
    held: str, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, held)
    with pytest.raises(UserError, match=rf"^{section}\.api_key_env: {VARIABLE} holds a blank, a control") as raised:
        USERS[section]({"url": "http://127.0.0.1:9", "api_key_env": VARIABLE}, None)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("section", USERS)
@pytest.mark.parametrize("url", ["http://host:abc", "http://me:SECRET@[::1", "https://-é-.com"])
def test_what_is_no_address_is_refused_at_the_start(url: str, section: str) -> None:
    with pytest.raises(UserError, match=rf"^{section}\.urls?: no address of a server: write http") as raised:
        USERS[section]({"url": url}, None)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("section", USERS)
@pytest.mark.parametrize("login", ["", "me:SECRET!@"])
def test_an_error_of_a_request_that_quotes_its_headers_shows_none(
    login: str, section: str, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()

    def fail(_: Any, request: httpx.Request) -> httpx.Response:
        value = request.headers["Authorization"]
        shown.append(value.rpartition(" ")[2])
        raise httpx.LocalProtocolError(f"Illegal header value {value.encode()!r} {value!r} {json.dumps(value)} {value}")

    async def fail_async(transport: Any, request: httpx.Request) -> httpx.Response:
        return fail(transport, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", fail)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", fail_async)
    monkeypatch.setenv(VARIABLE, KEY)
    found = USERS[section]({"url": f"http://{login}127.0.0.1:9", "api_key_env": VARIABLE}, make_group(["ab"]))
    assert "Illegal header value" in found
    assert found.count("***") == 4
    assert shown[0] not in found
    assert "SECRET" not in found


def test_what_loggers_are_given_masks_a_key_as_it_is_sent() -> None:
    settings = {"judge": {"api_key_env": VARIABLE}, "notes": [f"asked with {KEY}"]}
    assert without_secrets(settings, {VARIABLE: f"{KEY}\r\n"})["notes"] == ["asked with ***"]
