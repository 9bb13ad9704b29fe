"""Engines of families that need something of their own, or over two nodes: SGLang computes what transformers does."""

import asyncio
from base64 import b64decode
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.shared_memory import LOADER, TensorSpec, export_to_host
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
# Of equal scores transformers takes any. With many heads and no token whose embedding is zero, no two keys score 0.
SPARSE = {"index_topk": 6, "index_n_heads": 32, "pad_token_id": None}
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
    "deepseek_v32": ("deepseek_v32", SPARSE),
    "glm_moe_dsa": ("glm_moe_dsa", SPARSE),  # the second layer shares the keys that the first selects
    "fewer_tokens_than_keys": ("deepseek_v32", SPARSE | {"index_topk": 128}),
}
RESENT = ("gpt_oss", "deepseek_v32", "glm_moe_dsa")  # with matrices that other families do not have


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
        resent = asyncio.run(score_with_other_weights(process, other)) if family in RESENT else None
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
    """Send all weights of a folder as a weight sync does, with each expert of a stack by itself."""
    with HfReader(folder) as reader:
        weights = [(name, reader.read(name).contiguous()) for name in sorted(reader.names)]
    async with aclosing(EngineClient(process.spec.index, process.url, process.headers, REQUEST_TIMEOUT_S)) as client:
        await client.begin_weight_update()
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
        with export_to_host(weights, specs) as export:
            await client.update_weights_from_tensor([serialize([export])], load_format=LOADER)
        await client.end_weight_update(1)
        (scores,) = await client.score([TOKENS])
        return scores


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_selected_keys_do_not_depend_on_cached_prefixes_or_chunks(
    family: str, make_spec: Callable[..., EngineSpec], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_tiny(folder, family, make_tokenizer(["apples"]), 1, num_hidden_layers=4, **WIDE | SPARSE)
    args = {"chunked_prefill_size": 16, "enable_return_indexer_topk": True, "enable_deterministic_inference": True}
    with started_engine(make_spec(model=folder, args=args), tmp_path / "engine.log") as process:
        process.wait_ready(START_TIMEOUT_S)
        first, cached, continued, captured = asyncio.run(decode_in_parts(process, TOKENS * 4))
    assert (first.cached_tokens, cached.cached_tokens) == (0, len(TOKENS) * 4 - 1)
    assert cached == replace(first, cached_tokens=cached.cached_tokens)
    assert continued.cached_tokens >= len(TOKENS) * 4
    assert (continued.tokens, continued.logprobs) == (first.tokens[20:], first.logprobs[20:])
    tokens = [*TOKENS * 4, *first.tokens]
    expected, logprobs = selected_by_transformers(folder, tokens)
    assert (torch.tensor(first.logprobs) - logprobs[-len(first.tokens) :]).abs().max() <= BOUND
    selected = torch.frombuffer(bytearray(b64decode(captured)), dtype=torch.int32).view(len(tokens), 4, -1)
    for position, layers in enumerate(selected):
        for layer, row in enumerate(layers.tolist()):
            assert {place for place in row if place >= 0} == expected[layer][position]


async def decode_in_parts(process: EngineProcess, prompt: list[int]) -> tuple[Any, ...]:
    """Decode 30 tokens, the same ones over the cached prompt, and the last 10 over a longer prefix.

    The last result is the base64 of the positions that each token attends to.
    """
    async with aclosing(EngineClient(process.spec.index, process.url, process.headers, REQUEST_TIMEOUT_S)) as client:
        (first,) = await client.decode([prompt], 30)
        (cached,) = await client.decode([prompt], 30)
        (continued,) = await client.decode([[*prompt, *first.tokens[:20]]], 10)
        body = {"input_ids": [*prompt, *first.tokens], "return_indexer_topk": True}
        reply = await client._call("POST", "/generate", body | {"sampling_params": {"max_new_tokens": 1}})
        return first, cached, continued, reply["meta_info"]["indexer_topk"]


@torch.no_grad()
def selected_by_transformers(folder: Path, tokens: list[int]) -> tuple[list[list[set[int]]], torch.Tensor]:
    """Return the positions that transformers selects, by layer and token, and the logprobs of all tokens but the first.

    A layer without an indexer has the positions of the layer before.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    selected: list[list[set[int]]] = []
    for layer in model.model.layers:
        if layer.self_attn.indexer is None:
            layer.register_forward_hook(lambda *_: selected.append(selected[-1]))
        else:
            layer.self_attn.indexer.register_forward_hook(
                lambda _, __, rows: selected.append(
                    [{place for place in row if place <= position} for position, row in enumerate(rows[0].tolist())]
                )
            )
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return selected, logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


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
