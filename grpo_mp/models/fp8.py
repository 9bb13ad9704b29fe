"""Blockwise FP8 as in the releases of DeepSeek-V3 and R1: float8_e4m3fn values, one float32 scale per 128 x 128 block.

Is quantize(dequantize(w)) exact? Let a block have bytes w and scale s, and let x = dequantize(w, s) in bfloat16 or
float32. x / s equals w up to a relative error of 2**-8.

- Bytes: half the distance to the next e4m3 value is at least 2**-5 (relative). Rounding x with any scale within 2**-8
  of s therefore recovers w. `quantize` uses the scale max|x| / 448. This is within 2**-8 of s exactly if the largest
  byte of the block encodes 448. For these blocks, and for blocks of zeros, the bytes are recovered. If the largest byte
  encodes m < 448, the block is rescaled to 448 and its bytes change.
- Scale: max|x| / 448 equals s up to the rounding of x. It equals s exactly if `quantize` made s from values of the same
  dtype bfloat16: 448 * s then rounds back to the original bfloat16. In float32 it may be off by one unit in the last
  place, since 448 = 7 * 64 and float32(7 * s) / 7 may differ from s.
- So values alone do not determine the bytes of an arbitrary checkpoint. `requantize` therefore also reads the source
  and keeps bytes and scale of every block whose values are unchanged.

Blocks with values below the normal range of the dtype (2**-126) are excluded, except from the last statement.

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
    first, last = start[0], start[0] + weight.shape[0]
    for block in range(first // BLOCK, -(-last // BLOCK)):
        rows = slice(max(block * BLOCK - first, 0), (block + 1) * BLOCK - first)
        result[rows] = _float32(weight[rows]).mul_(factors[block])
    return result


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [R, C] to FP8 [R, C] and scales of `scale_shape`: max|block| / 448, or 1 for a block of zeros."""
    result = torch.empty(weight.shape, dtype=FP8)
    scale = torch.ones(scale_shape(tuple(weight.shape)))
    for block, (rows, out) in enumerate(zip(weight.split(BLOCK), result.split(BLOCK), strict=True)):
        values = rows.to(torch.float32, copy=True)
        largest = _pad_to_blocks(values.abs().amax(dim=0), 0.0).amax(dim=1) / E4M3_MAX
        scale[block] = torch.where(largest > 0, largest, scale[block])
        values.div_(_per_column(scale[block], values.shape[1]))
        out.copy_(values.clamp_(-E4M3_MAX, E4M3_MAX))  # the cast turns values above 464 into NaN
    return result, scale


def quantize_at_once(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize bit for bit as `quantize`, in a few large operations for GPUs, AT_ONCE elements at a time."""
    rows, columns = weight.shape
    step = max(1, AT_ONCE // (columns * BLOCK)) * BLOCK
    if rows <= step:
        return _quantize_part(weight)
    parts = [_quantize_part(part) for part in weight.split(step)]
    return torch.cat([values for values, _ in parts]), torch.cat([scale for _, scale in parts])


def _quantize_part(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    values, padding = weight.to(torch.float32, copy=True), (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = functional.pad(values, padding) if any(padding) else values  # pad always copies
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, 128, columns, 128]
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=(1, 3)) / E4M3_MAX  # max|block| in one pass over memory
    scale = torch.where(largest > 0, largest, 1.0)
    blocks = blocks.div_(scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(FP8).contiguous(), scale


def requantize(weight: Tensor, old: Tensor, old_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize, but keep bytes and scale of each block whose values equal those of the old FP8 weight."""
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
    """Convert FP8 to float32, faster than torch's cast.

    The shifted e4m3 bits, read as float16, give the value times 2**-8.
    """
    bits = weight.view(torch.int8)
    values = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256)
    without_sign = bits & NAN
    return values.masked_fill_(without_sign == NAN, torch.nan) if without_sign.max() == NAN else values


def _pad_to_blocks(columns: Tensor, padding: float) -> Tensor:
    return functional.pad(columns, (0, -columns.shape[0] % BLOCK), value=padding).view(-1, BLOCK)


def _per_column(blocks: Tensor, columns: int) -> Tensor:
    return blocks.repeat_interleave(BLOCK)[:columns]
