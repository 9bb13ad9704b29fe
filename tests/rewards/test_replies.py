"""Whatever a server answers, scores are finite numbers or there is a sentence of what is wrong with the reply."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grpo_mp.algorithms.distillation_settings import TeacherConfig
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.teacher import TeacherClient, check_served_tokens
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleGroup
from tests.http_server import chat_reply
from tools.tiny.models import make_tokenizer

MakeGroup = Callable[..., SampleGroup]
Answer = Callable[[bytes, str], None]  # sets what every request is answered from now on: body and type
URL = "http://127.0.0.1:9"
PIECES = (
    "Score: ",
    "3",
    "-",
    ".",
    "{",
    "}",
    '"score"',
    ":",
    "[",
    '"',
    "NaN",
    "9" * 400,
    "1e999",
    "\ud800",
    "é",
    "\x00",
)
DEEP = ("[" * 100_000).encode()
TYPES = st.sampled_from(
    ["application/json", *(f"text/plain; charset={name}" for name in ("base64", "idna", "x", "utf-7"))]
)

texts = st.lists(st.sampled_from(PIECES) | st.text(st.characters())).map("".join)
numbers = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats()
values = st.recursive(
    numbers | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def as_chat(content: Any) -> Any:
    return {"choices": [{"message": {"content": content}}]}


def as_scores(score: Any) -> Any:
    return [{"embedding": [score]}, {"embedding": [1.0]}]


def as_logprobs(logprob: Any) -> Any:
    return [{"meta_info": {"input_token_logprobs": [[None, 2], [logprob, token]]}} for token in (97, 98)]


replies = st.binary() | values.map(json.dumps).map(str.encode)
for shape in (as_chat, as_scores, as_logprobs):
    replies |= values.map(shape).map(json.dumps).map(str.encode)
replies |= texts.map(chat_reply).map(str.encode)
some = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def answer() -> Iterator[Answer]:
    """Answers all requests, without a network."""
    held = [b"", ""]

    def handle(_: Any, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=held[0], headers={"Content-Type": str(held[1])})

    async def handle_async(transport: Any, request: httpx.Request) -> httpx.Response:
        return handle(transport, request)

    def set_reply(body: bytes, kind: str) -> None:
        held[:] = [body, kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx.HTTPTransport, "handle_request", handle)
        patch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle_async)
        yield set_reply


@pytest.fixture(scope="module", params=["judge", "model", "steps"])
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    """A scorer by one server whose failures give -2."""
    judge = {"url": URL, "model": "m", "retries": 0, "cache": tmp_path_factory.mktemp("judge") / "replies.sqlite"}
    own: dict[str, dict[str, Any]] = {
        "judge": {"judge": judge},
        "model": {"model": {"url": URL, "retries": 0}},
        "steps": {"steps": {"url": URL, "retries": 0}},
    }
    scorer = Scorer(RewardConfig.model_validate({**own[request.param], "on_error": -2.0}), 10, decode=str)
    yield scorer
    scorer.close()


@some
@given(body=replies, kind=TYPES)
@example(body=chat_reply("Score: 3 \ud800").encode(), kind="application/json")
@example(body=b"hello", kind="text/plain; charset=base64")
@example(body=json.dumps(as_scores(10**400)).encode(), kind="application/json")
@example(body=DEEP, kind="application/json")
def test_a_score_is_finite_or_the_call_failed(
    body: bytes, kind: str, scorer: Scorer, answer: Answer, make_group: MakeGroup
) -> None:
    answer(body, kind)
    group = make_group(["a", "b"])
    first, again = scorer.score_group(group), scorer.score_group(group)  # the second may be from a cache
    for sample in first.samples:
        assert math.isfinite(sample.reward)
        assert all(math.isfinite(reward) for _, reward in sample.step_rewards)
    assert again == first
    for sentence in scorer.take_stats().first_errors.values():
        assert sentence.encode()


@some
@given(body=replies, kind=TYPES)
@example(body=DEEP, kind="application/json")
@example(body=b'{"text": 3}', kind="application/json")
@example(body=b'{"text": null}', kind="application/json")
@example(body=b"hello", kind="text/plain; charset=base64")
def test_a_logprob_is_finite_or_there_is_a_sentence(
    body: bytes, kind: str, answer: Answer, make_group: MakeGroup
) -> None:
    answer(body, kind)
    config = TeacherConfig(url=URL, retries=0)
    client = TeacherClient(config)
    sentences, logprobs = list[str](), list[float]()
    try:
        scored = client.score_group(make_group(["a", "b"]))
        logprobs = [value for sample in scored.samples for value in sample.teacher_logprobs]
    except UserError as error:
        sentences.append(str(error))
    finally:
        client.close()
    try:
        sentences.append(check_served_tokens(config, TOKENIZER))
    except UserError as error:  # a list of other texts
        sentences.append(str(error))
    assert all(map(math.isfinite, logprobs))
    assert bool(logprobs) + len(sentences) == 2
    assert all(sentence.startswith("algorithm.distillation.teacher") for sentence in sentences)


TOKENIZER = make_tokenizer(["apples", "pears"])
