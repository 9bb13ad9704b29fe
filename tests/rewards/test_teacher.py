"""The teacher's client against a real HTTP server that answers in the shape of SGLang's own."""

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rewards import reward_model
from grpo_mp.rewards.teacher import DETOKENIZE, PATH, TeacherClient, check_served_tokens
from grpo_mp.trainer.preflight import make_teachers
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import SampleGroup
from tests.http_server import JsonServer, Reply
from tools.tiny.models import make_tokenizer

MakeGroup = Callable[..., SampleGroup]


class Server(JsonServer):
    """Gives token n at place i the logprob -n - i / 1000, less `lower`; `reply` takes the place of its next answer.

    With a tokenizer it also decodes tokens.
    """

    def __init__(self, lower: int = 0, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__()
        self.lower = lower
        self.tokenizer = tokenizer
        self.reply: Reply | None = None

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        if self.reply:
            return self.reply
        if self.tokenizer and path == DETOKENIZE:
            return 200, json.dumps({"text": self.tokenizer.batch_decode(body["tokens"])})
        starts = zip(body["input_ids"], body["logprob_start_len"], strict=True)
        k = body.get("top_logprobs_num")
        return 200, json.dumps(
            [
                {"meta_info": {"input_token_logprobs": entries(*pair, self.lower)} | (flat(*pair, k) if k else {})}
                for pair in starts
            ]
        )


def flat(tokens: list[int], start: int, k: int) -> dict[str, Any]:
    """SGLang's arrays: token n at place i is followed by its neighbors, each half as likely as the one before."""
    places = [(i, token) for i, token in enumerate(tokens) if i > start]
    ids = np.array([[token + j for j in range(k)] for _, token in places], np.int32)
    logprobs = np.array([[-(j + 1) * math.log(2) - i / 1000 for j in range(k)] for i, _ in places], np.float32)
    return {
        f"input_top_logprobs_{name}_flat_b64": base64.b64encode(array.tobytes()).decode()
        for name, array in (("idx", ids), ("val", logprobs))
    }


def entries(tokens: list[int], start: int, lower: int = 0) -> list[list[Any]]:
    """SGLang's: the first has no logprob, and each has a place for its text."""
    return [[-token - i / 1000 - lower if i > start else None, token, None] for i, token in enumerate(tokens)][start:]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server().serving() as server:
        yield server


@pytest.fixture
def teacher(server: Server) -> Iterator[TeacherClient]:
    client = TeacherClient(ServedModelConfig(path=server.url))
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


@pytest.fixture
def topk_teacher(server: Server) -> Iterator[TeacherClient]:
    client = TeacherClient(ServedModelConfig(path=server.url), topk=3, vocab_size=101)
    yield client
    client.close()


def test_every_place_has_its_most_likely_tokens(
    server: Server, topk_teacher: TeacherClient, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In requests of no more values than the limit, but for a sequence that has more; without unknown tokens."""
    monkeypatch.setattr("grpo_mp.rewards.teacher.MAX_TOPK_VALUES", 6)
    scored = topk_teacher.score_group(make_group(["a", "b", "bcd", "c"])).samples
    assert [[ids[2:] for ids in body["input_ids"]] for body in server.bodies] == [[[97], [98]], [[98, 99, 100]], [[99]]]
    flags = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    assert all(body.items() >= {"top_logprobs_num": 3, **flags}.items() for body in server.bodies)
    topk = scored[2].teacher_topk
    assert topk is not None
    assert topk.ids.tolist() == [[98, 99, 100], [99, 100, -1], [100, -1, -1]]
    expected = [[-(j + 1) * math.log(2) - i / 1000 for j in range(3)] for i in (2, 3, 4)]
    assert np.allclose(topk.logprobs, expected, atol=1e-6)
    assert (topk.ids.dtype, topk.logprobs.dtype) == (np.int32, np.float32)
    assert [len(sample.teacher_logprobs) for sample in scored] == [1, 1, 3, 1]


def test_a_server_without_top_logprobs(server: Server, topk_teacher: TeacherClient, make_group: MakeGroup) -> None:
    server.reply = 200, json.dumps([{"meta_info": {"input_token_logprobs": entries([1, 2, 97], 1)}}])
    with pytest.raises(UserError, match=r"^algorithm.distillation.teacher: prompt 12: http") as raised:
        topk_teacher.score_group(make_group(["a"]))
    assert "no top logprobs in flat arrays: serve the teacher by a version of SGLang that knows" in str(raised.value)


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
        ((200, "hello"), "answered 'hello', not the logprobs of given tokens: serve a causal language model"),
        ((200, json.dumps([{"meta_info": {"input_token_logprobs": [[None, 2, None], [-1.0, 98, None]]}}])), "of other"),
        ((200, '[{"meta_info": {"input_token_logprobs": [[null, 2], [NaN, 97]]}}]'), "that is not finite"),
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
    client = TeacherClient(ServedModelConfig(path=server.url))
    try:
        return check_served_tokens(client, tokenizer)
    finally:
        client.close()


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
        with pytest.raises(UserError, match=r"^algorithm.distillation.teacher.path: ") as raised:
            check(server, others, tokenizer)
        assert f"{many} of the policy's {len(texts)} tokens are others there, such as {shown}" in str(raised.value)


def test_a_server_that_cannot_be_asked_is_warned_of(server: Server, tokenizer: PreTrainedTokenizerBase) -> None:
    warning = check(server, (500, "it has no tokenizer"), tokenizer)
    assert warning.startswith("algorithm.distillation.teacher: its tokenizer could not be compared with the policy's (")


def test_the_teacher_of_a_data_set_scores_its_groups(
    server: Server, tokenizer: PreTrainedTokenizerBase, make_group: MakeGroup
) -> None:
    """Sets with equal teachers share one, which is tested once at the start; a failure names the set."""
    server.tokenizer = tokenizer
    hf = HfConfig(Path(), {"vocab_size": len(tokenizer)})
    with Server(500, tokenizer).serving() as other:
        urls = {"math": server.url, "code": other.url, "algebra": server.url}
        config = DistillationConfig.model_validate({"teacher": {name: {"path": url} for name, url in urls.items()}})
        teachers, warnings = make_teachers(config, hf, tokenizer)
        assert teachers
        assert not warnings
        assert server.paths == other.paths == [DETOKENIZE, PATH]
        for name, lower in (("math", 0), ("code", 500), ("algebra", 0), ("code", 500)):
            scored = teachers.score_group(make_group(["a", "bc"], data_set=name))
            found = [value for sample in scored.samples for value in sample.teacher_logprobs]
            assert found == pytest.approx([-97.002 - lower, -98.002 - lower, -99.003 - lower], abs=1e-9)
        assert len(server.paths) == len(other.paths) == 4
        teachers.connect("teacher.code", [reward_model.Server(server.url, {})])
        scored = teachers.score_group(make_group(["a"], data_set="code"))
        assert scored.samples[0].teacher_logprobs == (-97.002,)
        teachers.connect("teacher.code", [reward_model.Server(other.url, {})])
        other.reply = 200, "hello"
        with pytest.raises(UserError, match=r"^algorithm.distillation.teacher.code: prompt 12: http"):
            teachers.score_group(make_group(["a"], data_set="code"))
        teachers.close()


def test_a_teacher_of_one_set_or_of_all_needs_no_column(
    server: Server, tokenizer: PreTrainedTokenizerBase, make_group: MakeGroup
) -> None:
    server.tokenizer = tokenizer
    one = {"path": server.url}
    for teacher in (one, {"train": one}, {"math": one, "code": one}):
        config = DistillationConfig.model_validate({"teacher": teacher})
        assert DistillationConfig.model_validate(config.model_dump()) == config
        teachers, _ = make_teachers(config, HfConfig(Path(), {"vocab_size": len(tokenizer)}), tokenizer)
        assert teachers
        (sample,) = teachers.score_group(make_group(["a"])).samples
        assert sample.teacher_logprobs == (-97.002,)
        teachers.close()
