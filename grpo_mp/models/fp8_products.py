"""Shapes of the matrices that training.fp8_format multiplies in FP8."""

from collections.abc import Iterable

from grpo_mp.models.mapping import Rule
from grpo_mp.utils.errors import UserError

FP8_MULTIPLE = 16  # elements


def check_fp8_products(rules: Iterable[Rule], tensor: int, expert_tensor: int) -> None:
    """Raise UserError for a projection of which a rank holds a part that TransformerEngine cannot multiply in FP8.

    On Hopper both operands of an FP8 product lie along the axis that is summed over: columns of a weight in the forward
    pass, its rows for the gradient of the input. cuBLAS reads such lines in units of 16 bytes (`CanonicalizeGemmInput`
    in TransformerEngine's cublaslt_gemm.cu, which a run reaches in its first step).
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
