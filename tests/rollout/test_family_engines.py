"""Engines of families that need something of their own, or over two nodes: SGLang computes what transformers does."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.shared_memory import LOADER, export_to_host, specs_of
from grpo_mp.weight_sync.transport import serialize
from tests.engines import started_engine
from tests.parallel.cases import HYBRID
from tests.rollout.conftest import REQUEST_TIMEOUT_S, START_TIMEOUT_S, Logprobs
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = pytest.mark.slow
BOUND = 1e-5
GENERATED_TOKENS = 70  # more than the engine's attention has room for at first
TOKENS = [5, 9, 30, 7, 41, 18, 22, 50, 3, 61]
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
WIDE = {"initializer_range": 0.1}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "without_yarn": ("deepseek_v3", {"q_lora_rank": None, "rope_scaling": None, "n_group": 1, "topk_group": 1}),
    "beyond_the_original_length": ("qwen3", {"rope_scaling": YARN}),
    "positions_by_four": ("qwen3", {"rope_scaling": LINEAR}),
    "half_rotated": ("glm4_moe", {}),
    "hy_v3": ("hy_v3", {}),
    "minimax_m2": ("minimax_m2", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "qwen3_next": ("qwen3_next", HYBRID),
    "qwen3_5": ("qwen3_5_text", HYBRID),
    "gpt_oss": ("gpt_oss", {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_transformers(
    name: str, make_spec: Callable[..., EngineSpec], expected_logprobs: Logprobs, tmp_path: Path
) -> None:
    family, shape = FAMILIES[name]
    folder = tmp_path / "model"
    other = tmp_path / "other"
    for seed, path in enumerate((folder, other)):
        make_tiny(path, family, make_tokenizer(["apples"]), seed, num_hidden_layers=2, **WIDE | shape)
    with started_engine(make_spec(model=folder), tmp_path / "engine.log") as process:
        process.wait_ready(START_TIMEOUT_S)
        (scores,), generated = asyncio.run(score_and_generate(process))
        resent = asyncio.run(score_with_other_weights(process, other)) if family == "gpt_oss" else None
    assert "Ignore import error" not in (tmp_path / "engine.log").read_text()  # of a model that this one is not

    def reference(tokens: list[int], model: Path = folder) -> torch.Tensor:
        return expected_logprobs(model, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    if resent:
        assert (torch.tensor(resent) - reference(TOKENS, other)).abs().max() <= BOUND
        assert (reference(TOKENS, other) - reference(TOKENS)).abs().max() > 0.1
    assert (torch.tensor(scores) - reference(TOKENS)).abs().max() <= BOUND
    for sample in generated:  # step by step, over the cache
        expected = reference([*TOKENS, *sample.tokens])[len(TOKENS) - 1 :]
        assert (torch.tensor(sample.logprobs) - expected).abs().max() <= BOUND


async def score_and_generate(process: EngineProcess) -> tuple[list[list[float]], list[EngineOutput]]:
    async with aclosing(EngineClient(process.spec.index, process.url, process.headers, REQUEST_TIMEOUT_S)) as client:
        generated = client.generate(TOKENS, SamplingParams(GENERATED_TOKENS, ignore_eos=True), 3)
        return await client.score([TOKENS]), await generated


async def score_with_other_weights(process: EngineProcess, folder: Path) -> list[float]:
    """Send all weights of a folder as a weight sync does: experts, which SGLang's loader takes stacked, one by one."""
    with HfReader(folder) as reader:
        weights = [(name, reader.read(name).contiguous()) for name in sorted(reader.names)]
    async with aclosing(EngineClient(process.spec.index, process.url, process.headers, REQUEST_TIMEOUT_S)) as client:
        await client.begin_weight_update()
        specs = specs_of(weights)
        with export_to_host(weights, specs) as export:
            await client.update_weights_from_tensor([serialize([export])], load_format=LOADER)
        await client.end_weight_update(1)
        (scores,) = await client.score([TOKENS])
        return scores


def test_an_engine_over_two_nodes(
    make_spec: Callable[..., EngineSpec], model_folder: Path, expected_logprobs: Logprobs, tmp_path: Path
) -> None:
    nodes = [make_spec(gpus=2, nodes=2, node_rank=node) for node in (0, 1)]
    first, second = (EngineProcess(spec, tmp_path / f"node_{spec.node_rank}.log") for spec in nodes)
    with ExitStack() as stack:
        stack.callback(first.stop)
        stack.callback(second.stop)
        dist_init_addr = first.start(host="127.0.0.1")
        assert second.start(dist_init_addr=dist_init_addr) == dist_init_addr
        first.wait_ready(START_TIMEOUT_S)
        (computed,), _ = asyncio.run(score_and_generate(first))
    expected = expected_logprobs(model_folder, TOKENS)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    assert computed == pytest.approx(expected.tolist(), abs=1e-4)
