"""Blockwise FP8 as DeepSeek-V3 and R1 are released: float8_e4m3fn bytes and one float32 factor per 128 x 128 block.

What comes back bit for bit. Let a block be bytes w with factor s, and x = dequantise(w, s) in bfloat16 or float32.

- Bytes: x / s is w within 2**-8, half the distance to the next e4m3 value is 2**-5 or more, so rounding with a factor
  within 2**-8 of s finds w again. `quantise` takes max|x| / 448, which is such a factor exactly where the largest
  byte of the block stands for 448; there, and in blocks of zeros, quantise(dequantise(w)) has the bytes of w. A block
  whose largest byte is m < 448 is stretched to 448 and its bytes change.
- Factor: max|x| / 448 is s only up to the rounding of x. It is s itself where s was made by `quantise` from values
  of the same dtype bfloat16: 448 * s then rounds back to the bfloat16 it came from. In float32 it may miss by one
  unit in the last place, since 448 = 7 * 64 and float32(7 * s) / 7 need not be s.
- So no rule finds the bytes of any folder from values alone. `requantise` does: it keeps bytes and factors of every
  block of the source whose values have not changed.

Blocks whose values leave the normal range of the dtype (below 2**-126) are outside of these statements, save the last.
"""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn
FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"  # a weight's factors have its name with this suffix


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the factors of a [rows, columns] weight."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def dequantise(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype, start: tuple[int, int] = (0, 0)) -> Tensor:
    """FP8 [R, C] -> values [R, C] of `dtype`.

    `weight` may be a slice of a whole that begins at row and column `start`; `scale_inv` is the whole's.
    """
    rows, columns = ((torch.arange(size) + first) // BLOCK for size, first in zip(weight.shape, start, strict=True))
    factors = scale_inv.float().index_select(0, rows).index_select(1, columns)
    return factors.mul_(weight.float()).to(dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values [R, C] -> FP8 [R, C] and factors of `scale_shape`, each max|block| / 448; 1 where a block is zero."""
    blocks = _blocks(weight.float())
    scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    scaled = (blocks / scale[:, None, :, None]).clamp_(-LARGEST, LARGEST)  # above 464 the cast would make NaN
    return _cut(scaled, weight.shape).to(FP8), scale


def requantise(weight: Tensor, old: Tensor, old_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantise`, but a block whose values are those of the old FP8 weight keeps its old bytes and factor."""
    new, scale = quantise(weight)
    same = dequantise(old, old_scale, weight.dtype).eq(weight)
    kept = _blocks(same, padding=True).all(dim=3).all(dim=1)
    rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
    mask = kept.index_select(0, rows).index_select(1, columns)
    merged = torch.where(mask, old.view(torch.uint8), new.view(torch.uint8)).view(FP8)
    return merged, torch.where(kept, old_scale.float(), scale)


def _blocks(values: Tensor, padding: float = 0.0) -> Tensor:
    """[R, C] -> [R / 128, 128, C / 128, 128], the last blocks padded."""
    rows, columns = scale_shape(tuple(values.shape))
    missing = (0, columns * BLOCK - values.shape[1], 0, rows * BLOCK - values.shape[0])
    return functional.pad(values, missing, value=padding).view(rows, BLOCK, columns, BLOCK)


def _cut(blocks: Tensor, shape: torch.Size) -> Tensor:
    whole = blocks.reshape(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)
    return whole[: shape[0], : shape[1]].contiguous()
