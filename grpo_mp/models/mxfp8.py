"""MXFP8 of the OCP Microscaling Formats: float8_e4m3fn values, one power of two (e8m0) for 32 columns of a row."""

import torch
from torch import Tensor

from grpo_mp.models.fp8 import E4M3_MAX, FP8

BLOCK = 32
MANTISSA = 23  # bits of the mantissa of float32


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [R, C] to FP8 [R, C] and exponents + 127, uint8 [R, C / 32].

    The scale of a block is the least power of two that is no less than max|block| / 448, so that no value is cut, as in
    SGLang's `mxfp8_group_quantize` (`downcast_to_mxfp` of triton_kernels). `weight`: C is a multiple of 32.
    """
    blocks = weight.to(torch.float32, copy=True).unflatten(1, (-1, BLOCK))
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=2) / E4M3_MAX
    exponents = largest.view(torch.int32).add_((1 << MANTISSA) - 1).bitwise_right_shift_(MANTISSA)  # rounds up
    scale = exponents.clamp(min=1).bitwise_left_shift_(MANTISSA).view(torch.float32)
    return blocks.div_(scale[:, :, None]).flatten(1).to(FP8), exponents.to(torch.uint8)
