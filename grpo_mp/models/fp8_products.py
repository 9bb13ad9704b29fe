"""Check of matrix shapes for training.fp8_format."""

from collections.abc import Iterable

from grpo_mp.models.mapping import Rule
from grpo_mp.utils.errors import UserError

FP8_MULTIPLE = 16  # elements


def check_fp8_products(rules: Iterable[Rule], tensor: int, expert_tensor: int) -> None:
    """Raise UserError if TransformerEngine cannot multiply a rank's part of a projection in FP8.

    On Hopper, both operands of an FP8 product are contiguous along the summed axis: the columns of a weight in the
    forward pass, its rows for the gradient of the input. cuBLAS needs a multiple of 16 elements there
    (`CanonicalizeGemmInput` in TransformerEngine's cublaslt_gemm.cu). Without this check, the first step would fail.
    """
    for param in (rule.example() for rule in rules if rule.layers):
        if not (param.is_projection or param.name.endswith("eh_proj.weight")):
            continue
        ranks, setting = (expert_tensor, "expert_tensor") if param.experts else (tensor, "tensor")
        rows, columns = param.local_shape(ranks)
        if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE:
            lower = f"lower layout.{setting}, or " if ranks > 1 else ""
            raise UserError(
                f"training.fp8_format: with layout.{setting}={ranks} a rank holds {rows} x {columns} elements of "
                f"{param.name}, and FP8 products need multiples of {FP8_MULTIPLE}: {lower}set fp8_format to null"
            )
