"""Experts that a real engine returns with its responses, against those of transformers."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_mp.distributed.layout import IndexerShape, ModelShape, model_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.groups import joined
from grpo_mp.rollout.routed_experts import (
    ARGUMENT,
    check_replayed_keys,
    check_routed_experts,
    joined_routed_experts,
    known_tokens,
    read_choices,
)
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import ExpertIds
from tests.rollout.test_client import PROMPT, Ask, generate_while, send_weights

TURNS = Path(__file__).parent / "test_episodes.py"
LONG = SamplingParams(max_response_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def shape(model_folder: Path) -> ModelShape:
    return model_shape(HfConfig.read(model_folder))


@pytest.fixture(scope="module")
def expected(shape: ModelShape) -> Callable[[Path, Sequence[int]], torch.Tensor]:
    """What transformers' routers choose for all tokens but the last: [T - 1, layers, top-k], ascending."""
    model = cache(lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    @torch.no_grad()
    def choose(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
        logits = model(folder)(torch.tensor([list(tokens[:-1])]), output_router_logits=True).router_logits
        return torch.stack([layer.topk(shape.experts_per_token).indices.sort().values for layer in logits], dim=1)

    return choose


def ascending(experts: ExpertIds | None) -> torch.Tensor:
    assert experts is not None
    assert experts.dtype == np.uint8
    return torch.from_numpy(np.sort(experts, axis=-1)).long()


def test_of_a_group_and_of_prompts_that_the_engine_knows(
    ask: Ask, shape: ModelShape, model_folder: Path, expected: Callable[..., torch.Tensor]
) -> None:
    """The second request has its prompt in the cache, the third a part of it."""
    longer = [*PROMPT, *range(30, 60)]
    for prompt, cached in ((PROMPT, 0), (PROMPT, len(PROMPT) - 1), (longer, len(PROMPT))):
        outputs = ask(lambda client, prompt=prompt: client.generate(prompt, LONG, 4, shape))
        assert all(output.cached_tokens >= cached for output in outputs)
        for output in outputs:
            assert torch.equal(ascending(output.routed_experts), expected(model_folder, [*prompt, *output.tokens]))


def test_of_all_turns_of_an_episode(
    roll_out: Callable[..., Any], model_folder: Path, expected: Callable[..., torch.Tensor]
) -> None:
    """Those of tokens that were given, too: the next turn computes them."""
    _, group = roll_out(f"{TURNS}:three_turns")
    for sample in group.samples:
        assert sample.given_tokens
        every = [*sample.prompt_tokens, *sample.tokens]
        assert torch.equal(ascending(sample.routed_experts), expected(model_folder, every))


def test_a_resumed_response_keeps_those_of_each_version(
    ask: Ask, shape: ModelShape, model_folder: Path, other_folder: Path, expected: Callable[..., torch.Tensor]
) -> None:
    begun = generate_while(
        ask, lambda client: client.abort_all(), lambda group: group[0].aborted and len(group[0].tokens) > 4, shape
    )[0]
    tokens = [*PROMPT, *begun.tokens]

    async def resume(client: EngineClient) -> list[EngineOutput]:
        await send_weights(client, other_folder, 61)
        known = known_tokens(begun.routed_experts, len(begun.tokens))
        return await client.generate(tokens, SamplingParams(8, ignore_eos=True), 1, shape, known)

    try:
        more = ask(resume)[0]
    finally:
        ask(lambda client: send_weights(client, model_folder, 62))
    assert more.routed_experts is not None
    assert len(more.routed_experts) == len(more.tokens) == 8  # those that are known do not come again
    response = joined(begun, more)
    every = [*PROMPT, *response.tokens]
    actual = ascending(response.routed_experts)
    known = len(tokens) - 1
    assert len(actual) == len(every) - 1
    assert torch.equal(actual[:known], expected(model_folder, every)[:known])
    assert torch.equal(actual[known:], expected(other_folder, every)[known:])
    assert not torch.equal(actual[:known], expected(other_folder, every)[:known])


def encoded(values: Any) -> dict[str, str]:
    return {"routed_experts": base64.b64encode(np.array(values, np.int32).tobytes()).decode()}


def test_what_no_router_chose_is_not_replayed(shape: ModelShape) -> None:
    sizes = (3, shape.num_layers, shape.experts_per_token)
    good = np.broadcast_to(np.arange(shape.experts_per_token), sizes).copy()
    read = read_choices(encoded(good), 3, shape)
    assert read is not None
    assert np.array_equal(read, good)
    for broken in (good[:2], good - 1, good + shape.num_experts, np.where(np.arange(3)[:, None, None] == 2, 0, good)):
        assert read_choices(encoded(broken), 3, shape) is None
    assert read_choices({}, 3, shape) is None
    rest = read_choices(encoded(good[:1]), 3, shape, known=2)
    assert rest is not None
    assert len(rest) == 1
    assert read_choices(encoded(good), 3, shape, known=2) is None


def with_indexer(shape: ModelShape, topk: int = 2) -> ModelShape:
    return replace(shape, indexer=IndexerShape(frozenset((0, shape.num_layers - 1)), heads=1, head_dim=4, topk=topk))


def test_keys_are_read_beside_experts(shape: ModelShape) -> None:
    """Of 5 tokens, 3 have more keys than the 2 that indexers choose; slots of a cache and zeros are no keys."""
    sparse = with_indexer(shape)
    sizes = (5, shape.num_layers, shape.experts_per_token)
    experts = encoded(np.broadcast_to(np.arange(shape.experts_per_token), sizes))
    draws = np.random.default_rng(0).random((5, shape.num_layers, 5)) + 9 * (np.arange(5) > np.arange(5)[:, None, None])
    keys = draws.argsort(-1)[..., :2].astype(np.int32)
    keys[:2] = -1

    def read(sent: npt.NDArray[np.int32], known: int = 0) -> ExpertIds | None:
        chosen = encoded(np.broadcast_to(np.arange(shape.experts_per_token), (5 - known, *sizes[1:])))
        return read_choices({**chosen, "indexer_topk": base64.b64encode(sent.tobytes()).decode()}, 5, sparse, known)

    choices = read(keys)
    assert choices is not None
    assert np.array_equal(choices["keys"], keys[:, [0, -1]])
    assert np.array_equal(choices["experts"], read_choices(experts, 5, shape))
    rest = read(keys, known=3)
    assert rest is not None
    assert np.array_equal(rest, choices[3:])
    joined_choices = joined_routed_experts(choices[:3], rest, 3, 2)
    assert joined_choices is not None
    assert np.array_equal(joined_choices, choices)
    for token, wrong in ((4, 5), (4, -1), (3, 4), (2, 64)):
        broken = keys.copy()
        broken[token, -1, 0] = wrong
        assert read(broken) is None
    assert read(np.zeros_like(keys)) is None
    assert read(keys[:4]) is None
    assert read_choices(experts, 5, sparse) is None


def test_where_keys_cannot_be_replayed(shape: ModelShape) -> None:
    sparse = with_indexer(shape, topk=2048)
    replicas = {"attn_dp_size": 8}
    check_replayed_keys(replicas, 8, sparse, 3000)
    bytes_per_token = shape.num_layers * 2048 * 4
    for args, of, tokens, sentence in (
        (replicas, shape, 3000, "needs a model with sparse attention"),
        (replicas, sparse, 2048, "has no effect: an indexer chooses 2048 keys, and sequences have at most 2048 tokens"),
        ({}, sparse, 3000, r"of one GPU each: set engine.args.attn_dp_size=8: change that, or set R3"),
        (
            replicas,
            sparse,
            2**32 // bytes_per_token + 1,
            "GiB of keys with a sequence .*, the limit is 4 GiB",
        ),
    ):
        with pytest.raises(UserError, match=f"training.router_replay=R3_keys .*{sentence}"):
            check_replayed_keys(args, 8, of, tokens)


def test_an_engine_without_capture_is_found_at_start(ask: Ask, shape: ModelShape) -> None:
    ask(lambda client: client.check_routed_experts(shape))
    with pytest.raises(UserError, match=r"engine 3: .*SGLang does not return the experts .*R2 or none"):
        ask(lambda client: client.check_routed_experts(_with_other_layers(shape)))


def _with_other_layers(shape: ModelShape) -> ModelShape:
    return ModelShape(**vars(shape) | {"is_moe_layer": (True,) * (shape.num_layers + 1)})


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache: SGLang would return"),
        ({"chunked_prefill_size": -1}, "chunked_prefill_size above 0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size above 0"),
    ],
)
def test_engine_arguments_that_lose_experts_are_refused(args: dict[str, Any], sentence: str, shape: ModelShape) -> None:
    check_routed_experts({}, {ARGUMENT}, shape)
    with pytest.raises(UserError, match=rf"training.router_replay=R3 .*{sentence}"):
        check_routed_experts(args, {ARGUMENT}, shape)
    with pytest.raises(UserError, match="the installed one does not"):
        check_routed_experts({}, set(), shape)
