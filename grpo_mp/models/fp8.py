"""Blockwise FP8 as DeepSeek-V3 and R1 are released: float8_e4m3fn bytes and one float32 factor per 128 x 128 block.

What comes back bit for bit. Let a block be bytes w with factor s, and x = dequantize(w, s) in bfloat16 or float32.

- Bytes: x / s is w within 2**-8, half the distance to the next e4m3 value is 2**-5 or more, so rounding with a factor
  within 2**-8 of s finds w again. `quantize` takes max|x| / 448, which is such a factor exactly where the largest
  byte of the block encodes 448; there, and in blocks of zeros, quantize(dequantize(w)) has the bytes of w. A block
  whose largest byte is m < 448 is stretched to 448 and its bytes change.
- Factor: max|x| / 448 is s only up to the rounding of x. It is s itself where s was made by `quantize` from values
  of the same dtype bfloat16: 448 * s then rounds back to the bfloat16 it came from. In float32 it may miss by one
  unit in the last place, since 448 = 7 * 64 and float32(7 * s) / 7 need not be s.
- So no rule finds the bytes of any folder from values alone. `requantize` does: it keeps bytes and factors of every
  block of the source whose values have not changed.

Blocks whose values leave the normal range of the dtype (below 2**-126) are outside of these statements, save the last.
"""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
AT_ONCE = 2**25  # elements that a GPU quantizes at a time
E4M3_MAX = 448.0
FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"  # a weight's factors have its name with this suffix
NAN = 0x7F  # byte of float8_e4m3fn, without its sign


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the factors of a [rows, columns] weight."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def dequantize(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype, start: tuple[int, int] = (0, 0)) -> Tensor:
    """Convert FP8 [R, C] to values [R, C] of `dtype`.

    `weight` may be a slice that begins at row and column `start` of a tensor; `scale_inv` is that tensor's.
    """
    result = torch.empty(weight.shape, dtype=dtype)
    if not weight.numel():
        return result
    columns = (torch.arange(weight.shape[1]) + start[1]) // BLOCK
    factors = scale_inv.float().index_select(1, columns)
    first, last = start[0], start[0] + weight.shape[0]
    for block in range(first // BLOCK, -(-last // BLOCK)):
        rows = slice(max(block * BLOCK - first, 0), (block + 1) * BLOCK - first)
        result[rows] = _float32(weight[rows]).mul_(factors[block])
    return result


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convert values [R, C] to FP8 [R, C] and factors of `scale_shape`: max|block| / 448, or 1 for a block of zeros."""
    result = torch.empty(weight.shape, dtype=FP8)
    scale = torch.ones(scale_shape(tuple(weight.shape)))
    for block, (rows, out) in enumerate(zip(weight.split(BLOCK), result.split(BLOCK), strict=True)):
        values = rows.to(torch.float32, copy=True)
        largest = _pad_to_blocks(values.abs().amax(dim=0), 0.0).amax(dim=1) / E4M3_MAX
        scale[block] = torch.where(largest > 0, largest, scale[block])
        values.div_(_per_column(scale[block], values.shape[1]))
        out.copy_(values.clamp_(-E4M3_MAX, E4M3_MAX))  # above 464 the cast would make NaN
    return result, scale


def quantize_at_once(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as `quantize`, bit for bit, in few large operations for a GPU, AT_ONCE elements at a time."""
    rows, columns = weight.shape
    step = max(1, AT_ONCE // (columns * BLOCK)) * BLOCK
    if rows <= step:
        return _quantize_part(weight)
    parts = [_quantize_part(part) for part in weight.split(step)]
    return torch.cat([values for values, _ in parts]), torch.cat([scale for _, scale in parts])


def _quantize_part(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    values, padding = weight.to(torch.float32, copy=True), (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = functional.pad(values, padding) if any(padding) else values  # it would copy
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, 128, columns, 128]
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=(1, 3)) / E4M3_MAX  # max|block|, read once
    scale = torch.where(largest > 0, largest, 1.0)
    blocks = blocks.div_(scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(FP8).contiguous(), scale


def requantize(weight: Tensor, old: Tensor, old_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize, but keep bytes and factor of each block whose values are those of the old FP8 weight."""
    same = dequantize(old, old_scale, weight.dtype).eq(weight)
    if bool(same.all()):
        return old, old_scale.float()
    new, scale = quantize(weight)
    for block, (same_rows, out, old_rows) in enumerate(
        zip(same.split(BLOCK), new.view(torch.uint8).split(BLOCK), old.view(torch.uint8).split(BLOCK), strict=True)
    ):
        kept = _pad_to_blocks(same_rows.all(dim=0), True).all(dim=1)
        scale[block] = torch.where(kept, old_scale[block].float(), scale[block])
        out.copy_(torch.where(_per_column(kept, same_rows.shape[1]), old_rows, out))
    return new, scale


def _float32(weight: Tensor) -> Tensor:
    """Convert FP8 to float32. Bits of e4m3, moved, are those of a float16 2**-8 as large; torch's own cast is slow."""
    bits = weight.view(torch.int8)
    values = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256)
    without_sign = bits & NAN
    return values.masked_fill_(without_sign == NAN, torch.nan) if without_sign.max() == NAN else values


def _pad_to_blocks(columns: Tensor, padding: float) -> Tensor:
    return functional.pad(columns, (0, -columns.shape[0] % BLOCK), value=padding).view(-1, BLOCK)


def _per_column(blocks: Tensor, columns: int) -> Tensor:
    return blocks.repeat_interleave(BLOCK)[:columns]
