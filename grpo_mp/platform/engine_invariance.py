"""Batch-invariant operators for a CPU engine: the result of a row does not depend on the rest of the batch.

With MKL, a row of an fp32 matrix product is bitwise the same for all numbers of rows from 16 on, but not below. So
matrices of fewer rows are padded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 16
ELEMENTWISE = ("sigmoid", "silu", "softplus")
VECTOR = 32  # elements of a vectorized loop; torch computes the remaining elements with another implementation


def enable_batch_invariance() -> torch.library.Library:
    """Replace the CPU operators in this process, as long as the returned library exists."""
    library = torch.library.Library("aten", "IMPL")
    operators: dict[str, Callable[..., Tensor]] = {
        "mm": mm,
        "bmm": bmm,
        "bmm.out": bmm_out,
        "addmm": addmm,
        "_grouped_mm": grouped_mm,
    }
    operators |= {name: partial(_whole_vectors, getattr(torch.ops.aten, name).out) for name in ELEMENTWISE}
    for name, function in operators.items():
        library.impl(name, function, "CPU")
    return library


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return [M, K] @ [K, N]."""
    return torch.mm(_filled(a), b, out=a.new_empty(max(len(a), MIN_ROWS), b.shape[1]))[: len(a)]


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return [B, M, K] @ [B, K, N]."""
    return torch.baddbmm(a.new_zeros(1, 1, 1), _filled(a), b, beta=0)[:, : a.shape[1]]


def bmm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write [B, M, K] @ [B, K, N] into `out`."""
    return out.copy_(bmm(a, b))


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta bias + alpha [M, K] @ [K, N]."""
    return bias * beta + mm(a, b) * alpha


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any) -> Tensor:
    """Return [M, N]: the product of each group of rows of a [M, K] with its matrix in b [E, K, N].

    `offs` [E]: end of each group.
    """
    assert offs is not None
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    product = a.new_zeros(len(a), b.shape[2])
    for matrix, start, end in zip(b, starts, ends, strict=True):
        if end > start:
            product[start:end] = mm(a[start:end], matrix)
    return product


def _whole_vectors(operator: Callable[..., Tensor], x: Tensor, *options: Any) -> Tensor:
    """Return an elementwise operator's result, computed by the vectorized loop for all elements."""
    filled = F.pad(x.flatten(), (0, -x.numel() % VECTOR))
    return operator(filled, *options, out=torch.empty_like(filled))[: x.numel()].view(x.shape)


def _filled(a: Tensor) -> Tensor:
    missing = MIN_ROWS - a.shape[-2]
    return F.pad(a, (0, 0, 0, missing)) if missing > 0 else a
