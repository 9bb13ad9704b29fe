"""The reward model's client against a real HTTP server that answers in the shape of SGLang's /classify."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from grpo_mp.rewards.reward_model import Server as Address
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleGroup
from tests.http_server import SLOW, JsonServer, Reply, limit_s

MakeGroup = Callable[..., SampleGroup]


class Server(JsonServer):
    """Scores a sequence with the sum of its ids; `failures` are answered first: (status, body) or a delay in s."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Reply | float] = []

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        failure = self.failures.pop(0) if self.failures else 0.0
        if isinstance(failure, tuple):
            return failure
        time.sleep(failure)
        return 200, json.dumps([{"embedding": [float(sum(ids))], "meta_info": {}} for ids in body["input_ids"]])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server().serving() as server:
        yield server


def score(
    url: str, group: SampleGroup, on_error: float | str = "stop", timeout_s: float = 60.0, **model: Any
) -> list[float]:
    settings = RewardConfig.model_validate({"model": {"path": url, **model}, "on_error": on_error})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_mp.rewards.reward_model.TIMEOUT_S", timeout_s)
        scorer = Scorer(settings, max_response_tokens=10)
    try:
        assert [*scorer.term_weights] == ["model"]
        return [sample.reward for sample in scorer.score_group(group).samples]
    finally:
        scorer.close()


def test_whole_sequences_go_out_in_one_call(server: Server, make_group: MakeGroup) -> None:
    assert score(server.url, make_group(["a", "bc"]), weight=0.5) == [50.0, 100.0]
    assert server.bodies == [{"input_ids": [[1, 2, 97], [1, 2, 98, 99]]}]
    assert server.paths == ["/classify"]


def test_a_proxy_of_the_environment_is_not_asked(
    server: Server, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert score(f"{server.url}/", make_group(["a"])) == [100.0]


ENTRY = {"embedding": [1.0], "meta_info": {}}
FAILURES: list[tuple[Any, int, str]] = [
    ((500, "out of memory"), 2, r"/classify answered status 500: out of memory"),
    ((400, '{"error": "too long"}'), 1, r'/classify answered status 400: {"error": "too long"}'),
    (SLOW, 2, r"/classify gave no answer \(ReadTimeout: timed out\)"),
    ((200, json.dumps([ENTRY])), 1, r"/classify returned 1 scores for 2 sequences"),
    ((200, json.dumps([ENTRY, {"embedding": [1.0, 2.0]}])), 2, r"not one score per sequence: serve a model with one"),
]


@pytest.mark.parametrize(("failure", "calls", "sentence"), FAILURES)
def test_broken_answers(
    failure: Any, calls: int, sentence: str, server: Server, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_mp.rewards.reward_model.RETRIES", 1)
    group = make_group(["a", "b"])
    server.failures = [failure] * calls
    with pytest.raises(UserError, match=rf"^reward model: prompt 12: .*{sentence}") as raised:
        score(server.url, group, timeout_s=limit_s(failure))
    assert len(server.bodies) == calls
    assert "\n" not in str(raised.value)
    server.failures = [failure] * calls
    assert score(server.url, group, on_error=-2.0, timeout_s=limit_s(failure)) == [-2.0, -2.0]


@pytest.mark.parametrize("on_error", ["skip", -2.0])
@pytest.mark.parametrize("failures", [[], [(400, "too long")]])
@pytest.mark.parametrize("steps", [{}, {"steps": "model"}], ids=["response", "steps"])
def test_a_model_that_the_job_serves_gives_later_what_one_elsewhere_gives_at_once(
    steps: dict[str, str], failures: list[Any], on_error: Any, server: Server, make_group: MakeGroup
) -> None:
    """`score_group` and `finish_group` together are `score_group` of the same server by its URL."""

    def scorer(**where: str) -> Scorer:
        reward = {"model": {"weight": 0.5, **where}, **steps, "on_error": on_error, "repetition": 0.3}
        return Scorer(RewardConfig.model_validate(reward), 10, decode=lambda tokens: "".join(map(chr, tokens)))

    group = make_group(["a", "a\n\nc", "dd"])
    server.failures = list(failures)
    elsewhere = scorer(path=server.url)
    expected = elsewhere.score_group(group)
    server.failures = list(failures)
    asked = len(server.bodies)
    own = scorer(path="reward_model")
    own.connect_model("steps" if steps else "model", [Address(server.url, {})])
    begun = own.score_group(group)
    assert len(server.bodies) == asked
    assert not any(sample.step_rewards or "model" in sample.reward_terms for sample in begun.samples)
    found = own.finish_group(begun)
    assert [sample.reward for sample in found.samples] == pytest.approx([s.reward for s in expected.samples])
    assert [sample.reward_terms for sample in found.samples] == [sample.reward_terms for sample in expected.samples]
    assert [sample.step_rewards for sample in found.samples] == [sample.step_rewards for sample in expected.samples]
    assert own.take_stats().to_dict() == elsewhere.take_stats().to_dict()
    asked = len(server.bodies)
    assert all("model" not in sample.reward_terms for sample in own.for_evaluation(10).score_group(group).samples)
    assert len(server.bodies) == asked
