"""The teacher's client against a real HTTP server that answers in the shape of SGLang's own."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_mp.algorithms.settings import TeacherConfig
from grpo_mp.errors import UserError
from grpo_mp.examples.tiny_models import make_tokenizer
from grpo_mp.rewards.teacher import TeacherClient, check_served_tokens, first_difference, same_tokens
from grpo_mp.types import SampleGroup
from tests.http_server import JsonServer, Reply

MakeGroup = Callable[..., SampleGroup]


class Server(JsonServer):
    """Gives token n at place i the logprob -n - i / 1000; `reply` takes the place of its next answer."""

    def __init__(self) -> None:
        super().__init__()
        self.reply: Reply | None = None
        self.paths: list[str] = []

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        self.paths.append(path)
        if self.reply:
            return self.reply
        starts = zip(body["input_ids"], body["logprob_start_len"], strict=True)
        return 200, json.dumps([{"meta_info": {"input_token_logprobs": entries(*pair)}} for pair in starts])


def entries(tokens: list[int], start: int) -> list[list[Any]]:
    """SGLang's: the first has no logprob, and each has a place for its text."""
    return [[-token - i / 1000 if i > start else None, token, None] for i, token in enumerate(tokens)][start:]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server().serving() as server:
        yield server


@pytest.fixture
def teacher(server: Server) -> Iterator[TeacherClient]:
    client = TeacherClient(TeacherConfig(url=server.url, retries=0))
    yield client
    client.close()


def test_every_token_of_every_response_has_its_logprob(
    server: Server, teacher: TeacherClient, make_group: MakeGroup
) -> None:
    group = make_group(["a", "bc"])
    scored = teacher.score_group(group)
    assert [sample.teacher_logprobs for sample in scored.samples] == [(-97.002,), (-98.002, -99.003)]
    assert [replace(sample, teacher_logprobs=()) for sample in scored.samples] == list(group.samples)
    assert server.bodies == [
        {
            "input_ids": [[1, 2, 97], [1, 2, 98, 99]],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": [1, 1],
        }
    ]
    assert server.paths == ["/generate"]


@pytest.mark.parametrize(
    ("echoed", "same"),
    [
        ([[1, 2, 9], [3]], True),
        ([[1, 2, 0], [3]], True),  # as SGLang shows the last one
        ([[1, 0, 0], [3]], False),
        ([[1, 2, 0], [0]], False),
        ([[1, 2, 8], [3]], False),
        ([[1, 2], [3]], False),
        ([[1, 2, 9]], False),
    ],
    ids=str,
)
def test_what_counts_as_the_tokens_that_were_sent(echoed: list[list[int]], same: bool) -> None:
    assert same_tokens([[1, 2, 9], [3]], echoed) is same


def test_every_sequence_of_a_forked_episode_is_scored_after_its_own_prompt(
    teacher: TeacherClient, make_group: MakeGroup
) -> None:
    last, earlier = make_group(["a", "bc"]).samples
    forked = replace(last, prompt_tokens=(1, 2, 3), earlier=(replace(earlier, part=1),))
    (scored,) = teacher.score_group(replace(make_group([]), samples=(forked,))).samples
    assert [part.teacher_logprobs for part in scored.sequences] == [(-98.002, -99.003), (-97.003,)]
    assert [part.part for part in scored.sequences] == [1, 0]


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ((500, "busy"), "/generate answered status 500: busy"),
        ((200, "hello"), "answered 'hello', not the logprobs of given tokens: serve a causal language model"),
        ((200, json.dumps([{"embedding": [1.0]}])), "not the logprobs of given tokens"),
        ((200, json.dumps([{"meta_info": {"input_token_logprobs": [[None, 2, None], [-1.0, 98, None]]}}])), "of other"),
        ((200, json.dumps([{"meta_info": {"input_token_logprobs": [[None, 2, None]]}}])), "of other tokens than those"),
        ((200, "[]"), "of other tokens than those that it was sent"),
        ((200, '[{"meta_info": {"input_token_logprobs": [[null, 2], [NaN, 97]]}}]'), "that is not finite"),
        ((200, '[{"meta_info": {"input_token_logprobs": [[null, 2], [null, 97]]}}]'), "not the logprobs of given"),
    ],
)
def test_broken_answers(
    reply: Reply, sentence: str, server: Server, teacher: TeacherClient, make_group: MakeGroup
) -> None:
    server.reply = reply
    with pytest.raises(UserError, match=r"^algorithm.distillation.teacher: prompt 12: http") as raised:
        teacher.score_group(make_group(["a"]))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer(["apples", "pears"])


def check(server: Server, texts: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    server.reply = texts if isinstance(texts, tuple) else (200, json.dumps({"text": texts}))
    return check_served_tokens(TeacherConfig(url=server.url), tokenizer)


def test_a_servers_tokens_are_compared_by_their_texts(server: Server, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    assert check(server, texts, tokenizer) == ""
    assert server.paths == ["/v1/detokenize"]
    assert server.bodies[0] == {"tokens": [[i] for i in range(len(texts))], "skip_special_tokens": False}
    number = 100
    for others, many, shown in (
        ([*texts[:number], "plums", *texts[number + 1 :]], 1, f"{number}: ['plums'] instead of {texts[number]!r}"),
        (texts[:-2], 2, f"{len(texts) - 2}: [] instead of {texts[-2]!r}"),
    ):
        with pytest.raises(UserError, match=r"^algorithm.distillation.teacher.url: http") as raised:
            check(server, others, tokenizer)
        assert f"{many} of the policy's {len(texts)} tokens are others there, such as {shown}" in str(raised.value)


@pytest.mark.parametrize("reply", [(500, "it has no tokenizer"), (200, "hello"), (200, "[]")])
def test_a_server_that_cannot_be_asked_is_warned_of(
    reply: Reply, server: Server, tokenizer: PreTrainedTokenizerBase
) -> None:
    warning = check(server, reply, tokenizer)
    assert warning.startswith("algorithm.distillation.teacher: its tokenizer could not be compared with the policy's (")
    assert len(server.bodies) == 1


def test_vocabularies_are_compared_by_content() -> None:
    assert first_difference({"a": 0, "b": 1}, {"b": 1, "a": 0}) == ""
    assert first_difference({"a": 0, "b": 1}, {"a": 1, "b": 0}) == (
        "2 of its 2 tokens are not those of the policy's 2: 0 is 'b', and the policy's is 'a'"
    )
    assert first_difference({"a": 0}, {"a": 0, "b": 1}).endswith("policy's 1: 1 is 'b', and the policy's is None")
