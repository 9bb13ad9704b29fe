"""The reward model's client against a real SGLang server with a reward head; its scores against transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from grpo_mp.examples.tiny_models import make_tokenizer
from grpo_mp.rewards.reward_model import step_ends
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.types import SampleGroup
from tests.engines import started_engine

pytestmark = pytest.mark.slow
START_TIMEOUT_S = 300.0
KEY = "REWARD_KEY"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model with one label, of two layers."""
    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = make_tokenizer([])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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

    def run(part: str, texts: list[str], **settings: str) -> SampleGroup:
        reward = {part: {"url": server.url, "api_key_env": KEY, **settings}}
        scorer = Scorer(RewardConfig.model_validate(reward), 16, decode=lambda tokens: "".join(map(chr, tokens)))
        scored = scorer.score_group(make_group(texts))
        scorer.close()
        return scored

    return run


def test_scores_are_those_of_transformers(model: Path, score: Callable[..., SampleGroup]) -> None:
    scored = score("model", ["yes", "no", "maybe so"])
    reference = LlamaForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    for sample in scored.samples:
        with torch.no_grad():
            expected = reference(torch.tensor([[*sample.prompt_tokens, *sample.tokens]])).logits.item()
        assert sample.reward_terms["model"] == pytest.approx(expected, abs=1e-4)
    assert len({sample.reward for sample in scored.samples}) == 3


def test_scores_of_steps_are_those_of_transformers_where_each_step_ends(
    model: Path, score: Callable[..., SampleGroup]
) -> None:
    """The head runs over the whole response at once: what it says at a step's last token is the step's score."""
    scored = score("steps", ["a=1\nb=2\n\nc", "none"], separator="\n")
    reference = LlamaForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    assert [[end for end, _ in sample.step_rewards] for sample in scored.samples] == [[3, 7, 9], [3]]
    for sample in scored.samples:
        with torch.no_grad():
            hidden = reference.model(torch.tensor([[*sample.prompt_tokens, *sample.tokens]])).last_hidden_state
            expected = reference.score(hidden)[0, len(sample.prompt_tokens) :, 0]
        for end, score in sample.step_rewards:
            assert score == pytest.approx(expected[end].item(), abs=1e-4)


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
    assert step_ends(pieces, "\n\n") == ends
