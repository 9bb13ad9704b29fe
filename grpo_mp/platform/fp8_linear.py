"""Linear layers in blockwise FP8 on a CPU, equivalent to TransformerEngine's recipe Float8BlockScaling on a GPU.

Operands are rounded to scaled FP8 values: inputs and gradients in tiles of 128 along the dimension of the sum, weights
in blocks of 128 x 128, each with a scale that is a power of 2 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). These
values are representable in bfloat16, so the product of the rounded matrices equals that of tensor cores up to the order
of the sums. Results and gradients have the dtype of the inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from grpo_mp.platform.te_layers import DuplicatedLinear, GroupedLinear

BLOCK = 128
Fp8Format = Literal["e4m3", "hybrid"]
GRADIENTS = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}


def round_to_fp8(x: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return x [R, C] rounded to scaled values of the FP8 `dtype`, in the dtype of x.

    Each `block` (rows, columns) has one scale: the largest power of 2 that keeps max|x| * scale in the range of FP8
    (Float8BlockScaling's default). Blocks at the edges may be smaller. A block of zeros has scale 1.
    """
    rows, columns = x.shape
    padded = functional.pad(x.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # [rows, block, columns, block]
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    limit = torch.finfo(dtype).max
    _, exponent = torch.frexp(torch.where(largest > 0, limit / largest, 1.0))  # 2**exponent is above the quotient
    rounded = torch.ldexp(torch.ldexp(blocks, exponent - 1).to(dtype).float(), 1 - exponent)
    return rounded.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(x.dtype)


class _Fp8Linear(torch.autograd.Function):
    """Computes x [T, in] @ weight [out, in].T; all three products of forward and backward pass are in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradients: torch.dtype) -> Tensor:
        weight = round_to_fp8(weight, (BLOCK, BLOCK), torch.float8_e4m3fn)
        # The weight gradient sums over tokens, so for backward the input is rounded in tiles along the tokens.
        ctx.save_for_backward(round_to_fp8(x, (BLOCK, 1), torch.float8_e4m3fn), weight)
        ctx.gradients = gradients
        return round_to_fp8(x, (1, BLOCK), torch.float8_e4m3fn) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = round_to_fp8(grad, (1, BLOCK), ctx.gradients) @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        return grad_x, round_to_fp8(grad, (BLOCK, 1), ctx.gradients).t() @ x, None


@dataclass(frozen=True)
class Fp8Matmul:
    """FP8 implementations of linear layers. `fp8_format`: as in Megatron; with "hybrid" gradients are e5m2."""

    fp8_format: Fp8Format

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Map x [..., in] -> [..., out]."""
        rows = _Fp8Linear.apply(x.flatten(0, -2), weight, GRADIENTS[self.fp8_format])
        return rows.unflatten(0, x.shape[:-1])

    def grouped(self, x: Tensor, splits: Sequence[int], *weights: Tensor) -> Tensor:
        """Map x [T, in] -> [T, out], with one weight [out, in] for each group of rows. `splits`: rows of the groups."""
        groups = x.split(list(splits))
        return torch.cat([self.linear(group, weight) for group, weight in zip(groups, weights, strict=True)])

    def parallel(
        self,
        *,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        tp_group: ProcessGroup | None,
        **others: Any,
    ) -> Tensor:
        """Replace `_forward_impl` of Megatron's column- and row-parallel linear layers."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = self.linear(input, weight)
        return output if bias is None else output + bias


def use_fp8(layers: torch.nn.Module, fp8_format: Fp8Format) -> None:
    """Make all linear layers inside the module `layers` compute in blockwise FP8."""
    matmul = Fp8Matmul(fp8_format)
    for layer in layers.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer._forward_impl = matmul.parallel
        elif isinstance(layer, DuplicatedLinear):
            layer.linear = matmul.linear
        elif isinstance(layer, GroupedLinear):
            layer.matmul = matmul.grouped
