"""Blockwise FP8: which round trips are exact, and reading FP8 folders. MXFP8: its scales are those of SGLang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.models import mxfp8
from grpo_mp.models.fp8 import FP8, dequantize, quantize, requantize, scale_shape

SHAPES = [(128, 128), (256, 384), (130, 70), (1, 1), (127, 257), (576, 200)]
DTYPES = [torch.bfloat16, torch.float32]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def draw_values(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random) * 0.02
    values[torch.rand(shape, generator=random) < 0.05] = -0.0
    return values.to(dtype)


def draw_bytes(shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0x80
    scale = torch.rand(scale_shape(shape), generator=random) * 1e-2 + 1e-6
    return weight.view(FP8), scale


def adversarial() -> dict[str, Tensor]:
    huge = torch.full((130, 140), 1e-3)
    tiny = torch.full((128, 128), 1e-41)
    huge[0, 0] = 1e30
    return {
        "zeros": torch.zeros(130, 140),
        "negative zeros": -torch.zeros(128, 128),
        "one huge": huge,
        "subnormal": tiny,
        "one in zeros": torch.eye(130),
        "largest bfloat16": torch.full((128, 128), torch.finfo(torch.bfloat16).max),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_scaled_so_that_its_largest_value_is_448(shape: tuple[int, int]) -> None:
    values = draw_values(shape, torch.float32)
    weight, scale = quantize(values)
    assert weight.dtype == FP8
    assert scale.shape == scale_shape(shape)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            largest = values[block].abs().max()
            assert scale[row, column] == (largest / 448 if largest else 1.0)
            assert weight[block].float().abs().max() == (448 if largest else 0)
            torch.testing.assert_close(
                weight[block].float() * scale[row, column], values[block], rtol=2**-4, atol=float(largest) * 2**-18
            )


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), shape=st.sampled_from(SHAPES))
def test_bytes_round_trip_where_a_block_reaches_448(seed: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, scale = draw_bytes(shape, seed)
    weight.view(torch.uint8)[::128, ::128] = 0xFE  # -448
    again, scale_again = quantize(dequantize(weight, scale, dtype))
    assert same_bits(again, weight)
    # 448 x factor is rounded to float32, then to the dtype; a 448th of it is rounded to float32.
    rounding = 2 * 2**-24 + (2**-8 if dtype == torch.bfloat16 else 0.0)
    torch.testing.assert_close(scale_again, scale, rtol=rounding * (1 + 2**-7), atol=0)


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), shape=st.sampled_from(SHAPES))
def test_any_bytes_and_factors_round_trip_with_the_source(
    seed: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, scale = draw_bytes(shape, seed)
    again, scale_again = requantize(dequantize(weight, scale, dtype), weight, scale)
    assert same_bits(again, weight)
    assert same_bits(scale_again, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", adversarial())
def test_adversarial_blocks_are_stable(name: str, dtype: torch.dtype) -> None:
    values = adversarial()[name].to(dtype)
    weight, scale = quantize(values)
    assert not weight.float().isnan().any()
    assert torch.equal(torch.signbit(weight.float()), torch.signbit(values))
    again, scale_again = requantize(dequantize(weight, scale, dtype), weight, scale)
    assert same_bits(again, weight)
    assert same_bits(scale_again, scale)


def test_only_changed_blocks_are_quantized_anew() -> None:
    weight, scale = draw_bytes((256, 256))
    values = dequantize(weight, scale, torch.bfloat16)
    values[200, 10] += 1.0
    again, scale_again = requantize(values, weight, scale)
    fresh, fresh_scale = quantize(values)
    assert same_bits(again[:128], weight[:128])
    assert same_bits(again[128:, 128:], weight[128:, 128:])
    assert same_bits(again[128:, :128], fresh[128:, :128])
    assert scale_again.flatten().tolist() == [*scale[0].tolist(), fresh_scale[1, 0].item(), scale[1, 1].item()]


def write_folder(folder: Path, **extra: Tensor) -> tuple[Tensor, Tensor]:
    weight, scale = draw_bytes((300, 200))
    save_file({"w": weight, "w_scale_inv": scale, "norm": torch.ones(3)} | extra, folder / "model.safetensors")
    return weight, scale


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("start", "stop"), [(0, 128), (60, 200), (7, 7)])
def test_a_reader_dequantizes_slices_as_the_whole_tensor(axis: int, start: int, stop: int, tmp_path: Path) -> None:
    weight, scale = write_folder(tmp_path)
    values = dequantize(weight, scale, torch.bfloat16)
    with HfReader(tmp_path) as reader:
        assert reader.names == {"w", "norm"}
        assert reader.read("w").dtype == torch.bfloat16
        assert same_bits(reader.read("w"), values)
        assert torch.equal(reader.read("w", axis, start, stop), values.narrow(axis, start, stop - start))
        assert torch.equal(reader.read("norm"), torch.ones(3))
        assert same_bits(reader.read_stored("w"), weight)
        assert [reader.dtype(name) for name in ("w", "norm")] == [FP8, torch.float32]


@pytest.mark.slow
def test_scales_of_mxfp8_are_those_of_sglangs_kernel() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/models/mxfp8_in_interpreter.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith(". ")


def test_mxfp8_keeps_values_within_the_rounding_of_e4m3_and_cuts_none() -> None:
    """The relative error of a value is at most 2**-4, or it is below the least normal number of its block."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 5, 64)[:, None]
    weight[7, 32:64] = 0.0
    values, exponents = mxfp8.quantize(weight)
    scale = torch.exp2(exponents.double() - 127).repeat_interleave(32, dim=1)
    error = (values.double() * scale - weight.double()).abs()
    assert (error <= torch.maximum(weight.double().abs() / 16, scale * 2.0**-10)).all()
    assert not values[7, 32:64].float().any()
    largest = values.float().unflatten(1, (-1, 32)).abs().amax(2)
    assert largest.max() <= 448
    assert largest[largest > 0].min() >= 224
