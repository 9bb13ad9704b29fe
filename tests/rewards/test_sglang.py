"""The reward model's client against a real SGLang server with a reward head; its scores against transformers."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from grpo_mp.rewards.reward_model import step_ends
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.reward_servers import MEMORY_TAGS
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.utils.types import SampleGroup
from tests.conftest import TinyRun
from tests.engines import started_engine
from tests.reward_models import make_reward_model

pytestmark = pytest.mark.slow
START_TIMEOUT_S = 300.0
KEY = "REWARD_KEY"


@pytest.fixture(scope="module")
def model(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model with one label, whose vocabulary is larger than ASCII.

    A Qwen3: SGLang gives its head a bias that the folder lacks, and nothing else that a Llama has not, as in tests/e2e.
    """
    folder = tmp_path_factory.mktemp("reward_model")
    make_reward_model(folder, tiny_run.model, family="qwen3")
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    args = {"is_embedding": True}
    spec = EngineSpec(index=0, rank=0, model=model, dtype="float32", context_tokens=128, cpu=True, args=args)
    with started_engine(spec, tmp_path_factory.mktemp("reward_log") / "engine.log") as engine:
        engine.wait_ready(START_TIMEOUT_S)
        yield engine


@pytest.fixture
def score(
    server: EngineProcess, make_group: Callable[..., SampleGroup], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SampleGroup]:
    """Scores texts, one token a character, by the server as a part of the reward."""
    monkeypatch.setenv(KEY, server.api_key)

    def run(part: str, texts: list[str]) -> SampleGroup:
        reward = {"model": {"path": server.url, "api_key_env": KEY}} | ({"steps": "model"} if part == "steps" else {})
        scorer = Scorer(RewardConfig.model_validate(reward), 16, decode=lambda tokens: "".join(map(chr, tokens)))
        scored = scorer.score_group(make_group(texts))
        scorer.close()
        return scored

    return run


def test_scores_are_those_of_transformers(model: Path, score: Callable[..., SampleGroup]) -> None:
    scored = score("model", ["yes", "no", "maybe so"])
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    for sample in scored.samples:
        with torch.no_grad():
            expected = reference(torch.tensor([[*sample.prompt_tokens, *sample.tokens]])).logits.item()
        assert sample.reward_terms["model"] == pytest.approx(expected, abs=1e-4)
    assert len({sample.reward for sample in scored.samples}) == 3


def test_scores_of_steps_are_those_of_transformers_where_each_step_ends(
    model: Path, score: Callable[..., SampleGroup]
) -> None:
    """The head runs over the whole response at once: what it says at a step's last token is the step's score."""
    scored = score("steps", ["a=1\n\nb=2\n\nc", "none"])
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    assert [[end for end, _ in sample.step_rewards] for sample in scored.samples] == [[4, 9, 10], [3]]
    for sample in scored.samples:
        with torch.no_grad():
            hidden = reference.model(torch.tensor([[*sample.prompt_tokens, *sample.tokens]])).last_hidden_state
            expected = reference.score(hidden)[0, len(sample.prompt_tokens) :, 0]
        for end, score in sample.step_rewards:
            assert score == pytest.approx(expected[end].item(), abs=1e-4)


def test_a_server_that_slept_scores_as_before(server: EngineProcess, score: Callable[..., SampleGroup]) -> None:
    """The requests that a job's own servers get around SCORE. On a CPU nothing is freed."""
    before = score("model", ["yes", "no"])

    async def sleep() -> None:
        async with aclosing(EngineClient(0, server.url, server.headers, 60.0)) as client:
            await client.release_memory(MEMORY_TAGS)
            await client.resume_memory(MEMORY_TAGS)

    asyncio.run(sleep())
    after = score("model", ["yes", "no"])
    rewards = [[sample.reward for sample in scored.samples] for scored in (before, after)]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-5)  # the cache was emptied


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["a", "\n\n", "b"], [1, 2]),
        (["a", "\n", "\n", "b", ".\n\nc"], [2, 4]),
        (["a", "\n\n", "\n\n"], [1]),
        (["\n\n", "a"], [1]),
        (["\n\n"], [0]),
        (["a"], [0]),
    ],
)
def test_where_steps_end(pieces: list[str], ends: list[int]) -> None:
    assert step_ends(pieces) == ends


def test_steps_of_an_episode_end_with_its_turns_and_in_nothing_that_it_was_given() -> None:
    pieces = ["a", "\n\n", "b", "result", "\n\n", "more", "c", "\n"]
    generated = [1, 1, 1, 0, 0, 0, 1, 1]
    assert step_ends(pieces, list(map(bool, generated))) == [1, 2, 7]
    assert step_ends(["a", "b"], [True, False]) == [0]
    assert step_ends(["a", "\n\n"], [False, False]) == []
