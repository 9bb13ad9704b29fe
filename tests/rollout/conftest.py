"""One real SGLang server for all tests of this folder, with a tiny random model, and the same model in transformers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from grpo_mp.config.sections import RolloutConfig
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.episodes import EpisodeGroup, EpisodeRunner, load_episode_parts
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.utils.types import Prompt, SampleGroup
from tests.engines import started_engine
from tools.tiny.models import make_tiny, make_tokenizer

START_TIMEOUT_S = 300.0  # a limit for a busy machine: alone it takes ten seconds
REQUEST_TIMEOUT_S = 60.0
Logprobs = Callable[..., torch.Tensor]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder with a random two-layer mixture of experts whose distributions are far from flat, by seed."""

    def make(seed: int) -> Path:
        folder = tmp_path_factory.mktemp(f"model_{seed}")
        shape = {"num_hidden_layers": 2, "hidden_size": 64, "initializer_range": 0.2}
        make_tiny(folder, "qwen3_moe", make_tokenizer(["apples"]), seed, **shape)
        return folder

    return make


@pytest.fixture(scope="session")
def model_folder(make_model: Callable[[int], Path]) -> Path:
    return make_model(1)


@pytest.fixture(scope="session")
def other_folder(make_model: Callable[[int], Path]) -> Path:
    return make_model(2)


@pytest.fixture(scope="session")
def make_spec(model_folder: Path) -> Callable[..., EngineSpec]:
    """Describes an engine on the CPU; any field can be set over it."""
    values: dict[str, Any] = {"index": 3, "rank": 1, "dtype": "float32", "context_tokens": 160, "cpu": True}

    def make(**changes: Any) -> EngineSpec:
        return EngineSpec(**({"model": model_folder} | values | changes))

    return make


@pytest.fixture(scope="session")
def engine(make_spec: Callable[..., EngineSpec], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A running server. A test that changes its weights puts them back."""
    spec = make_spec(args={"enable_return_routed_experts": True})
    with started_engine(spec, tmp_path_factory.mktemp("run") / "logs" / "engine_3.log") as process:
        process.wait_ready(START_TIMEOUT_S)
        yield process


@pytest.fixture
def ask(engine: EngineProcess) -> Callable[[Callable[[EngineClient], Awaitable[Any]]], Any]:
    """Runs a coroutine function on a new client of the engine."""

    def call(question: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with aclosing(
                EngineClient(engine.spec.index, engine.url, engine.headers, REQUEST_TIMEOUT_S)
            ) as client:
                return await question(client)

        return asyncio.run(run())

    return call


@pytest.fixture(scope="session")
def expected_logprobs() -> Logprobs:
    """What transformers says of a sequence: [T, V], log_softmax(logits / temperature) at every position."""
    models: dict[Path, Any] = {}

    @torch.no_grad()
    def compute(folder: Path, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return (models[folder](torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)

    return compute


@pytest.fixture
def roll_out(ask: Callable[..., Any], model_folder: Path) -> Callable[..., tuple[Prompt, SampleGroup]]:
    """Rolls out a group of episodes of one prompt by a rollout function."""

    def run(
        name: str,
        count: int = 2,
        sampling: SamplingParams | None = None,
        answer: str | None = None,
        columns: dict[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generate: Callable[..., Any] | None = None,  # answers in the engine's place
        **config: Any,
    ) -> Any:
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(str(model_folder))
        sizes = {"prompts_per_step": 1, "group_size": count, "max_prompt_tokens": 20, "max_response_tokens": 60}
        parts = load_episode_parts(RolloutConfig(**sizes | {"function": name} | config), tokenizer)
        assert parts
        message = {"role": "user", "content": "How many?"}
        tokens = parts.renderer.prompt([message])
        prompt = Prompt(4, "How many?", tokens, answer=answer, columns=columns or {}, messages=(message,))
        shape = model_shape(HfConfig.read(model_folder))

        async def group(client: EngineClient) -> SampleGroup:
            client.generate = generate or client.generate  # type: ignore[method-assign]
            runner = EpisodeRunner(parts, client, asyncio.Semaphore(2))
            try:
                samples = await runner.run_group(
                    EpisodeGroup(prompt, 7, count, 1, sampling or SamplingParams(60), shape)
                )
            finally:
                await parts.tools.close()
            return SampleGroup(prompt, samples)

        return prompt, ask(group)

    return run
