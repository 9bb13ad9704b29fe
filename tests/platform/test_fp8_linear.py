"""Blockwise FP8 on a CPU, against every value that FP8 has and products written out block by block in float64."""

import math

import megatron.core  # noqa: F401
import pytest
import torch
from torch import Tensor

from grpo_mp.platform.fp8_linear import Fp8Matmul, round_to_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an FP8 format that are nearest to x [N]; of two, the one whose last bit is 0."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    distances = (x[:, None] - values).abs().nan_to_num(nan=math.inf)
    is_nearest = distances == distances.amin(1, keepdim=True)
    return values[(is_nearest * torch.tensor([2, 1]).repeat(128)).argmax(1)]


def rounded(x: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """What `round_to_fp8` says it does, value by value."""
    result = torch.zeros_like(x, dtype=torch.float64)
    for row in range(0, x.shape[0], block[0]):
        for column in range(0, x.shape[1], block[1]):
            part = x[row : row + block[0], column : column + block[1]].double()
            largest = float(part.abs().max())
            factor = 2.0 ** math.floor(math.log2(LARGEST[dtype] / largest)) if largest else 1.0
            values = nearest(part.flatten() * factor, dtype) / factor
            result[row : row + block[0], column : column + block[1]] = values.view(part.shape)
    return result


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("block", [(1, 4), (4, 1), (4, 4)], ids=str)
def test_values_of_each_block_are_the_nearest_that_fp8_has(block: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 5, 10)
    x[0], x[:, 1], x[2, 2] = 0.0, 448.0, -1e-30
    assert torch.equal(round_to_fp8(x, block, dtype).double(), rounded(x, block, dtype))
    exact = round_to_fp8(x.bfloat16(), block, dtype)
    assert torch.equal(exact.double(), rounded(x.bfloat16(), block, dtype))  # bfloat16 holds each such value


@pytest.mark.parametrize(("fp8_format", "gradients"), [("e4m3", E4M3), ("hybrid", E5M2)])
def test_all_three_products_have_operands_in_fp8(fp8_format: str, gradients: torch.dtype) -> None:
    """Tiles of 128 lie along what is summed over: features of inputs, tokens where the weight's gradient is made.

    Tokens and features differ by many powers of 2: small values of a tile are rounded to few bits, or 0.
    """
    random = torch.Generator().manual_seed(1)
    tokens = 10.0 ** torch.linspace(-3, 3, 140)[torch.randperm(140, generator=random), None]
    features = 10.0 ** torch.linspace(-3, 3, 200)[torch.randperm(200, generator=random)]
    x = (torch.randn(140, 200, generator=random) * tokens * features).requires_grad_()
    weight = (torch.randn(150, 200, generator=random) / features).requires_grad_()
    grad = torch.randn(140, 150, generator=random) / tokens
    output = Fp8Matmul(fp8_format).linear(x.view(70, 2, 200), weight)
    output.backward(grad.view(70, 2, 150))
    with torch.no_grad():
        of_weight = rounded(weight, (128, 128), E4M3)
        assert_close(output.flatten(0, 1), rounded(x, (1, 128), E4M3) @ of_weight.T)
        assert_close(x.grad, rounded(grad, (1, 128), gradients) @ of_weight)
        assert_close(weight.grad, rounded(grad, (128, 1), gradients).T @ rounded(x, (128, 1), E4M3))


def test_tiles_of_an_expert_begin_at_its_first_token() -> None:
    random = torch.Generator().manual_seed(2)
    x, weights = torch.randn(50, 32, generator=random), torch.randn(3, 16, 32, generator=random)
    together = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    alone = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    matmul = Fp8Matmul("e4m3")
    matmul.grouped(together[0], [20, 0, 30], *together[1:]).square().sum().backward()
    outputs = [matmul.linear(alone[0][:20], alone[1]), matmul.linear(alone[0][20:], alone[3])]
    torch.cat(outputs).square().sum().backward()
    assert torch.equal(together[0].grad, alone[0].grad)
    assert torch.equal(together[1].grad, alone[1].grad)
    assert torch.equal(together[2].grad, torch.zeros(16, 32))  # an expert without tokens: a gradient, of 0
    assert torch.equal(together[3].grad, alone[3].grad)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    errors = (actual.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 1e-6
