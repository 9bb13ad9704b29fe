"""The reward model's client against a real SGLang server with a reward head; its scores against transformers."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

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

    def run(texts: list[str]) -> SampleGroup:
        reward = {"model": {"path": server.url, "api_key_env": KEY}}
        scorer = Scorer(RewardConfig.model_validate(reward), 16)
        scored = scorer.score_group(make_group(texts))
        scorer.close()
        return scored

    return run


def test_scores_are_those_of_transformers(model: Path, score: Callable[..., SampleGroup]) -> None:
    scored = score(["yes", "no", "maybe so"])
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    for sample in scored.samples:
        with torch.no_grad():
            expected = reference(torch.tensor([[*sample.prompt_tokens, *sample.tokens]])).logits.item()
        assert sample.reward_terms["model"] == pytest.approx(expected, abs=1e-4)
    assert len({sample.reward for sample in scored.samples}) == 3


def test_a_server_that_slept_scores_as_before(server: EngineProcess, score: Callable[..., SampleGroup]) -> None:
    """The requests that a job's own servers get around SCORE. On a CPU nothing is freed."""
    before = score(["yes", "no"])

    async def sleep() -> None:
        async with aclosing(EngineClient(0, server.url, server.headers, 60.0)) as client:
            await client.release_memory(MEMORY_TAGS)
            await client.resume_memory(MEMORY_TAGS)

    asyncio.run(sleep())
    after = score(["yes", "no"])
    rewards = [[sample.reward for sample in scored.samples] for scored in (before, after)]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-5)  # the cache was emptied
