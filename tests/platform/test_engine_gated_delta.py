"""Gated delta nets of a deterministic engine: a text gives the same bits however it is cut, beside any others."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mp.platform import engine_gated_delta as engine
from grpo_mp.platform.engine_invariance import enable_batch_invariance

TOKENS = 60
KEY_HEADS = 2
VALUE_HEADS = 6
KEY = 16
VALUE = 24
WINDOW = 4
HIDDEN = 64
CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
CUTS = ([60], [1] * 60, [33, 27], [7, 1, 52])  # tokens that are read at a time


@pytest.fixture(autouse=True)
def _invariant() -> Iterator[None]:
    library = enable_batch_invariance()
    yield
    library._destroy()


def gate_parameters() -> tuple[Tensor, Tensor]:
    return torch.empty(VALUE_HEADS).uniform_(-5.0, -1.0), torch.empty(VALUE_HEADS).uniform_(-0.3, 0.3)


def decay(rows: Tensor) -> Tensor:
    torch.manual_seed(1)
    a_log, bias = gate_parameters()
    return torch.cat(engine.fused_gdn_gating_cpu(a_log, rows[:, :VALUE_HEADS], rows[:, -VALUE_HEADS:], bias), 2)[0]


def shared_gate(rows: Tensor) -> Tensor:
    output = torch.zeros_like(rows)
    weight = torch.linspace(-1.0, 1.0, HIDDEN)
    engine.gate_shared_expert(None, rows, weight, rows, output, do_add=False)
    return output


@pytest.mark.parametrize("function", [decay, shared_gate])
def test_a_token_does_not_depend_on_those_beside_it(function: Callable[[Tensor], Tensor]) -> None:
    rows = torch.randn(TOKENS, HIDDEN)
    together = function(rows)
    for count in range(1, TOKENS):
        assert torch.equal(torch.cat([function(part) for part in rows.split([count, TOKENS - count])]), together)


def convolved(inputs: Tensor, weight: Tensor, cut: Sequence[int]) -> Tensor:
    """Return the outputs [D, T] of inputs [D, T]; single tokens are generated, longer parts are prompts."""
    outputs = list[Tensor]()
    states = torch.zeros(2, CHANNELS, WINDOW - 1)
    slots = torch.tensor([1])
    for part in inputs.split(cut, dim=1):
        if part.shape[1] == 1 and outputs:
            generated = engine.causal_conv1d_update_cpu(part.T, states, weight, None, "silu", conv_state_indices=slots)
            outputs.append(generated.T)
            continue
        requests = {"cache_indices": slots, "has_initial_state": torch.tensor([bool(outputs)])}
        bounds = torch.tensor([0, part.shape[1]])
        outputs.append(
            engine.causal_conv1d_fn_cpu(part, weight, None, conv_states=states, query_start_loc=bounds, **requests)
        )
    return torch.cat(outputs, 1)


def test_a_convolution_does_not_depend_on_cuts() -> None:
    inputs = torch.randn(CHANNELS, TOKENS)
    weight = torch.randn(CHANNELS, WINDOW)
    padded = F.pad(inputs.double(), (WINDOW - 1, 0))[None]
    expected = F.silu(F.conv1d(padded, weight.double()[:, None], groups=CHANNELS)[0])
    torch.testing.assert_close(convolved(inputs, weight, CUTS[0]).double(), expected, atol=1e-5, rtol=1e-5)
    for cut in CUTS:
        assert torch.equal(convolved(inputs, weight, cut), convolved(inputs, weight, CUTS[0]))


def mixed(tensors: dict[str, Tensor], cut: Sequence[int], others: int) -> Tensor:
    """Return the outputs [T, HV, V] of a text beside so many others; single tokens are generated."""
    a_log, bias = gate_parameters()
    states = torch.zeros(others + 2, VALUE_HEADS, VALUE, KEY)
    slots = torch.arange(1, others + 2)
    outputs = list[Tensor]()
    start = 0
    for count in cut:
        part = {name: tensor[: others + 1, start : start + count] for name, tensor in tensors.items()}
        start += count
        flat = {name: tensor.flatten(0, 1) for name, tensor in part.items()}
        q, k, v = (flat[name][None] for name in "qkv")
        if count == 1 and outputs:
            gates = {"A_log": a_log, "dt_bias": bias, "a": flat["a"], "b": flat["b"]}
            pool = {"initial_state_source": states, "initial_state_indices": slots}
            output = engine.fused_sigmoid_gating_delta_rule_update_cpu(q=q, k=k, v=v, **gates, **pool)
        else:
            g, beta = engine.fused_gdn_gating_cpu(a_log, flat["a"], flat["b"], bias)
            pool = {"initial_state": states, "initial_state_indices": slots}
            bounds = torch.arange(0, count * (others + 1) + 1, count)
            output, *_ = engine.chunk_gated_delta_rule_cpu(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=bounds, **pool)
        outputs.append(output[0, :count])
    return torch.cat(outputs)


def test_states_do_not_depend_on_cuts_and_on_other_requests() -> None:
    sizes = {"q": (KEY_HEADS, KEY), "k": (KEY_HEADS, KEY), "v": (VALUE_HEADS, VALUE), "a": (VALUE_HEADS,)}
    tensors = {name: torch.randn(4, TOKENS, *size) for name, size in (sizes | {"b": (VALUE_HEADS,)}).items()}
    results = list[Tensor]()
    for others in (0, 3):
        for cut in CUTS:
            torch.manual_seed(1)
            results.append(mixed(tensors, cut, others))
    assert all(torch.equal(result, results[0]) for result in results)
