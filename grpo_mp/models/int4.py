"""INT4 as in the releases of Kimi-K2-Thinking and K2.5: the format `pack-quantized` of compressed-tensors.

A weight [R, C] is stored as `weight_packed` [R, C / 8] (int32: eight values of 4 bits, the first in the lowest bits,
each with 8 added), `weight_scale` [R, C / 32], and `weight_shape`.
"""

import torch
from torch import Tensor

from grpo_mp.models.hf_config import INT4

# Suffixes of a weight's name that give the stored names
PACKED = "_packed"
SCALE = "_scale"
SHAPE = "_shape"
GROUP = 32  # columns with one scale
IN_WORD = 8  # values in an int32


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype, columns: tuple[int, int]) -> Tensor:
    """Convert INT4 to `dtype` [R, stop - start], for `columns` = (start, stop) of the full weight.

    `packed` and `scale`: the stored columns [start // 8, ceil(stop / 8)) and [start // 32, ceil(stop / 32)). Values are
    multiplied in the dtype of the scales, as by the compressed-tensors library.
    """
    start, stop = columns
    shifts = torch.arange(0, 4 * IN_WORD, 4, dtype=torch.int32)
    values = ((packed[:, :, None] >> shifts) & 0xF).flatten(1) - 8
    first = start // IN_WORD * IN_WORD
    values = values[:, start - first : stop - first].to(scale.dtype)
    groups = torch.arange(start, stop) // GROUP - start // GROUP
    return (values * scale[:, groups]).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [R, C] to `weight_packed` and `weight_scale`, by the functions of compressed-tensors.

    The scale is max|group| / 7.5, in the weight's dtype. `weight`: C is a multiple of 32.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as to_integers
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**INT4)
    least, most = weight.unflatten(1, (-1, GROUP)).aminmax(dim=2)
    scale, _ = calculate_qparams(least, most, arguments)
    values = to_integers(weight, scale, None, arguments, dtype=torch.int8)
    return pack_to_int32(values, INT4["num_bits"]), scale
