"""Engines that compute another function than the policy, beside those that only round otherwise."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_mp.policy.rounding import rounding_noise
from grpo_mp.weight_sync.compare import LEAST_LIMIT, ROUNDING_FACTOR, WRONG_FACTOR, compare

TOKENS = torch.randint(0, 512, (8, 64), generator=torch.Generator().manual_seed(1))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@torch.no_grad()
def logprobs(model: nn.Module, tokens: Tensor = TOKENS) -> list[list[float]]:
    scores = model(tokens).logits[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None])[..., 0].tolist()


def build(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a model whose parameters are in `dtype`, and whose rope is in float32 as in a loaded model."""
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def make_policy(precision: str, layers: int = 8, hidden: int = 128) -> LlamaForCausalLM:
    """Return a model with weights so large that each layer changes what the next one reads, as in trained models."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        vocab_size=512,
        initializer_range=0.12,
        rms_norm_eps=1e-5,
    )
    return build(config, DTYPES[precision])


def as_engine(policy: LlamaForCausalLM, **changed: object) -> LlamaForCausalLM:
    """Return a model of the policy's weights with other settings."""
    config = copy.deepcopy(policy.config)
    for name, value in changed.items():
        setattr(config, name, value)
    engine = build(config, policy.lm_head.weight.dtype)
    engine.load_state_dict(policy.state_dict())
    return engine


def distance(policy: LlamaForCausalLM, engine: nn.Module, precision: str) -> float:
    """Return how far an engine is from the policy, in units of what rounding changes in the policy."""
    expected = logprobs(policy)
    with rounding_noise([policy], precision, seed=0):
        noise = compare(logprobs(policy), expected).mean
    assert compare(logprobs(policy), expected).mean == 0  # the noise is gone
    return compare(logprobs(engine), expected).mean / max(noise, LEAST_LIMIT / ROUNDING_FACTOR)


def scaled_attention(engine: LlamaForCausalLM) -> None:
    for layer in engine.model.layers:
        layer.self_attn.scaling *= 1.5


def interleaved_rope(engine: LlamaForCausalLM) -> None:
    """Rotate neighbours in place of halves."""
    for layer in engine.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            heads = projection.weight.data.unflatten(0, (-1, 2, 16))
            projection.weight.data = heads.transpose(1, 2).flatten(0, 2).clone()


def swapped_gate(engine: LlamaForCausalLM) -> None:
    for layer in engine.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def one_layer_without_attention(engine: LlamaForCausalLM) -> None:
    engine.model.layers[3].self_attn.o_proj.weight.data.zero_()


SETTINGS = {
    "rope_scaling": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "norm_eps": {"rms_norm_eps": 1e-2},
}
CHANGES: dict[str, Callable[[LlamaForCausalLM], None]] = {
    change.__name__: change
    for change in (scaled_attention, interleaved_rope, swapped_gate, one_layer_without_attention)
}


@pytest.fixture(scope="module", params=DTYPES)
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def policy(precision: str) -> LlamaForCausalLM:
    return make_policy(precision)


@pytest.mark.parametrize("fault", [*SETTINGS, *CHANGES])
def test_another_function_is_beyond_what_rounding_explains(
    policy: LlamaForCausalLM, precision: str, fault: str
) -> None:
    engine = as_engine(policy, **SETTINGS.get(fault, {}))
    CHANGES.get(fault, lambda _: None)(engine)
    assert distance(policy, engine, precision) > WRONG_FACTOR


@pytest.mark.parametrize(("layers", "hidden"), [(2, 64), (24, 128)])
def test_other_rounding_passes_in_models_of_any_depth(precision: str, layers: int, hidden: int) -> None:
    """Attention by other kernels, and all in float32: noise replaces every rounding, so neither is farther than it."""
    policy = make_policy(precision, layers, hidden)
    assert distance(policy, as_engine(policy, _attn_implementation="eager"), precision) < ROUNDING_FACTOR
    assert distance(policy, copy.deepcopy(policy).float(), precision) < ROUNDING_FACTOR


def test_noise_grows_with_the_precisions_roundings(policy: LlamaForCausalLM, precision: str) -> None:
    expected = logprobs(policy)
    measured = {}
    for of in (precision, "fp8"):
        with rounding_noise([policy], of, seed=0):
            measured[of] = compare(logprobs(policy), expected).mean
    assert measured["fp8"] > 3 * measured[precision] > 0
