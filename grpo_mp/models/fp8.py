"""Blockwise FP8 as in the releases of DeepSeek-V3 and R1: float8_e4m3fn values, one float32 scale per 128 x 128 block.

quantize(dequantize(w)) recovers the bytes of a block whose largest byte encodes 448, as in releases, and of a block of
zeros. The scale is recovered up to the rounding of the dequantized values, so values alone do not determine the bytes
of any checkpoint: `requantize` also reads the source, and keeps bytes and scale of blocks whose values did not change.
"""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
AT_ONCE = 2**25  # elements quantized at a time on a GPU, to bound temporary memory
E4M3_MAX = 448.0
FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"  # suffix of a weight's name that gives the name of its scales
NAN = 0x7F  # byte of NaN in float8_e4m3fn, without the sign bit


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a [rows, columns] weight."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def dequantize(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype, start: tuple[int, int] = (0, 0)) -> Tensor:
    """Convert FP8 [R, C] to `dtype` [R, C].

    `weight` may be a slice of a tensor that begins at row and column `start`; `scale_inv` belongs to the full tensor.
    """
    result = torch.empty(weight.shape, dtype=dtype)
    if not weight.numel():
        return result
    columns = (torch.arange(weight.shape[1]) + start[1]) // BLOCK
    factors = scale_inv.float().index_select(1, columns)
    first = start[0]
    last = start[0] + weight.shape[0]
    for block in range(first // BLOCK, -(-last // BLOCK)):
        rows = slice(max(block * BLOCK - first, 0), (block + 1) * BLOCK - first)
        result[rows] = _float32(weight[rows]).mul_(factors[block])
    return result


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [R, C] to FP8 [R, C] and scales of `scale_shape`: max|block| / 448, or 1 for a block of zeros."""
    # On a CPU one row of blocks at a time fits the caches.
    step = max(1, AT_ONCE // (weight.shape[1] * BLOCK)) * BLOCK if weight.is_cuda else BLOCK
    parts = [_quantize_rows(part) for part in weight.split(step)]
    return torch.cat([values for values, _ in parts]), torch.cat([scale for _, scale in parts])


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    blocks = _blocks(weight.to(torch.float32, copy=True), 0.0)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=(1, 3)) / E4M3_MAX  # max|block| in one pass over memory
    scale = torch.where(largest > 0, largest, 1.0)
    # The cast turns values above 464 into NaN.
    blocks = blocks.div_(scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(FP8).contiguous(), scale


def requantize(weight: Tensor, old: Tensor, old_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize, but keep bytes and scale of each block whose values equal those of the old FP8 weight."""
    new, scale = quantize(weight)
    kept = _blocks(dequantize(old, old_scale, weight.dtype).eq(weight), True).all(dim=3).all(dim=1)
    rows = kept.repeat_interleave(BLOCK, dim=0)[: weight.shape[0]]
    mask = rows.repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
    values = torch.where(mask, old.view(torch.uint8), new.view(torch.uint8)).view(FP8)
    return values, torch.where(kept, old_scale.float(), scale)


def _blocks(matrix: Tensor, padding: float) -> Tensor:
    """Return a matrix as [row blocks, 128, column blocks, 128], padded with `padding`."""
    sizes = (0, -matrix.shape[1] % BLOCK, 0, -matrix.shape[0] % BLOCK)
    padded = functional.pad(matrix, sizes, value=padding) if any(sizes) else matrix  # pad always copies
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _float32(weight: Tensor) -> Tensor:
    """Convert FP8 to float32, faster than torch's cast.

    The shifted e4m3 bits, read as float16, give the value times 2**-8.
    """
    bits = weight.view(torch.int8)
    values = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256)
    without_sign = bits & NAN
    return values.masked_fill_(without_sign == NAN, torch.nan) if without_sign.max() == NAN else values
