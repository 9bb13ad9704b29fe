"""MXFP4 as in the releases of GPT-OSS: blocks of 32 four-bit values, two in a byte, and one power of two for each."""

import torch
from torch import Tensor

BLOCK = 32
# Suffixes of a tensor's name
BLOCKS = "_blocks"
SCALES = "_scales"
BIAS = 127  # of the exponents
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes; the fourth bit is the sign


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert blocks [..., n, 16] and scales [..., n], both uint8, to [..., n * 32], as transformers does."""
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=dtype)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[codes.int()], scales.int().unsqueeze(-1) - BIAS).to(dtype).flatten(-2)
