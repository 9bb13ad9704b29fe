"""Truncated sampling: settings of top_p, top_k and min_p."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

MAX_KEPT = 1024  # largest number of kept tokens at a position, if the engine returns them

Limits = dict[Literal["top_p", "top_k", "min_p"], float]


@dataclass(frozen=True)
class Truncation:
    """Limits of truncated sampling, as defined by SGLang.

    `top_p`: probability that the kept tokens reach together; `top_k`: largest number of kept tokens, None: no limit;
    `min_p`: least probability of a kept token, divided by the largest probability.
    """

    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    @property
    def is_active(self) -> bool:
        return self != Truncation()


def truncation_of(value: "float | Limits") -> Truncation:
    """Convert a setting `top_p`, which is a probability or a mapping of limits."""
    limits: Limits = value if isinstance(value, dict) else {"top_p": value}
    top_k = limits.get("top_k")
    return Truncation(limits.get("top_p", 1.0), None if top_k is None else int(top_k), limits.get("min_p", 0.0))


def _check(limits: Limits) -> Limits:
    found = truncation_of(limits)
    if not 0 < found.top_p <= 1:
        raise ValueError(f"top_p={found.top_p:g}: give a probability above 0, at most 1")
    if found.top_k is not None and not (1 <= found.top_k == limits["top_k"]):
        raise ValueError(f"top_k={limits['top_k']:g}: give a whole number of tokens, or leave it out")
    if not 0 <= found.min_p < 1:
        raise ValueError(f"min_p={found.min_p:g}: give a share of the largest probability, from 0 to below 1")
    return limits


TopP = Annotated[float, Field(gt=0, le=1)] | Annotated[Limits, AfterValidator(_check)]
