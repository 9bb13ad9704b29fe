"""The engine's layers against their formulas in float64, and their fallbacks to SGLang."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from grpo_mp.platform.engine_layers import (
    rms_norm_forward,
    rotary,
    routed_experts,
    share_products_among_threads,
)

CONFIG = SimpleNamespace(activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False)
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}


def no_fallback(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("left to SGLang")


def experts(count: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    up = torch.randn(count, 2 * inner, hidden) / 8
    down = torch.randn(count, hidden, inner) / 8
    return SimpleNamespace(w13_weight=up.to(dtype), w2_weight=down.to(dtype), moe_ep_size=1)


def experts_per_token(layer: SimpleNamespace, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    rows = []
    for token, token_weights, token_experts in zip(x.double(), weights.double(), ids, strict=True):
        total = torch.zeros_like(token)
        for weight, expert in zip(token_weights, token_experts, strict=True):
            gate, up = (layer.w13_weight[expert].double() @ token).chunk(2)
            total += weight * (layer.w2_weight[expert].double() @ (gate / (1 + (-gate).exp()) * up))
        rows.append(total)
    return torch.stack(rows).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_products_of_several_threads(rows: int, transposed: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    a = (torch.randn(rows, 48) / 8).to(dtype)
    b = torch.randn(80, 48).to(dtype).t()
    expected = (a.double() @ b.double()).to(dtype)
    library = share_products_among_threads()
    product = a @ (b if transposed else b.contiguous())
    threads = torch.get_num_threads()
    tolerance = TOLERANCE if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.01}
    try:
        torch.set_num_threads(2)
        shared = a @ (b if transposed else b.contiguous())
    finally:
        torch.set_num_threads(threads)
        library._destroy()
    torch.testing.assert_close(product, expected, **tolerance)
    torch.testing.assert_close(shared, expected, **tolerance)


@pytest.mark.parametrize(("tokens", "topk"), [(1, 2), (3, 1), (40, 4)])
def test_routed_experts(tokens: int, topk: int) -> None:
    torch.manual_seed(tokens)
    layer = experts(6, 16, 8)
    x = torch.randn(tokens, 16)
    weights, ids = torch.rand(tokens, 6).topk(topk)
    for dtype in (torch.int64, torch.int32):
        output = routed_experts(no_fallback, layer, x, (weights, ids.to(dtype), None), CONFIG)
        torch.testing.assert_close(output, experts_per_token(layer, x, weights, ids), **TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 40])
def test_ranks_of_an_expert_parallel_engine_add_up(tokens: int) -> None:
    torch.manual_seed(tokens)
    layer = experts(6, 16, 8)
    x = torch.randn(tokens, 16)
    weights, ids = torch.rand(tokens, 6).topk(2)
    total = torch.zeros_like(x)
    for rank in range(3):
        rows = slice(2 * rank, 2 * rank + 2)
        local = SimpleNamespace(w13_weight=layer.w13_weight[rows], w2_weight=layer.w2_weight[rows], moe_ep_size=3)
        local_ids = torch.where(ids // 2 == rank, ids - 2 * rank, -1)
        total += routed_experts(no_fallback, local, x, (weights, local_ids, None), CONFIG)
    torch.testing.assert_close(total, experts_per_token(layer, x, weights, ids), **TOLERANCE)


@pytest.mark.parametrize(
    ("config", "hidden", "dtype", "biased"),
    [
        ({"activation": "gelu"}, 16, torch.float32, False),
        ({"gemm1_alpha": 1.7}, 16, torch.float32, False),
        ({}, 16, torch.bfloat16, False),
        ({}, 16, torch.float32, True),
    ],
)
def test_unsupported_experts_fall_back_to_sglang(
    config: dict[str, Any], hidden: int, dtype: torch.dtype, biased: bool
) -> None:
    layer = experts(4, hidden, 8, dtype)
    x = torch.randn(2, hidden, dtype=dtype)
    if biased:
        layer.w2_weight_bias = torch.zeros(4, hidden)
    topk_output = (torch.rand(2, 1), torch.zeros(2, 1, dtype=torch.int32), None)
    runner_config = SimpleNamespace(**(vars(CONFIG) | config))
    calls = []
    routed_experts(lambda *args: calls.append(args), layer, x, topk_output, runner_config)
    assert calls == [(layer, x, topk_output, runner_config)]


def make_norm(size: int, **changes: Any) -> SimpleNamespace:
    values = {"variance_size_override": None, "override_orig_dtype": None, "fp32_residual": False}
    return SimpleNamespace(**(values | {"weight": torch.rand(size) + 0.5, "variance_epsilon": 1e-6} | changes))


def test_rms_norm() -> None:
    torch.manual_seed(1)
    norm = make_norm(16)
    x = torch.randn(3, 4, 16)
    residual = torch.randn(3, 4, 16)

    def expected(values: Tensor) -> Tensor:
        wide = values.double()
        return (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight).float()

    original = x.clone()
    torch.testing.assert_close(rms_norm_forward(no_fallback, norm, x), expected(x), **TOLERANCE)
    output, total = rms_norm_forward(no_fallback, norm, x, residual)
    torch.testing.assert_close(output, expected(x + residual), **TOLERANCE)
    torch.testing.assert_close(total, x + residual, atol=0, rtol=0)
    assert x.equal(original)


def make_embedding(size: int, **changes: Any) -> SimpleNamespace:
    angles = torch.arange(50)[:, None] * 100.0 ** -(torch.arange(size // 2) * 2 / size)
    values = {"head_size": size, "rotary_dim": size, "is_neox_style": True}
    return SimpleNamespace(**(values | {"cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1)} | changes))


def rotate(heads: Tensor, positions: Tensor, size: int) -> Tensor:
    first, second = heads.double().chunk(2, -1)
    angles = positions[:, None, None] * 100.0 ** -(torch.arange(size // 2, dtype=torch.float64) * 2 / size)
    result = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([result.real, result.imag], -1).float()


def test_rotary() -> None:
    torch.manual_seed(2)
    positions = torch.tensor([3, 49, 0])
    query = torch.randn(3, 4, 8)
    key = torch.randn(3, 2, 8)
    rotated = rotary(no_fallback, make_embedding(8), positions, query.flatten(1), key.flatten(1), None, None)
    for output, heads in zip(rotated, (query, key), strict=True):
        torch.testing.assert_close(output, rotate(heads, positions, 8).flatten(1), **TOLERANCE)
