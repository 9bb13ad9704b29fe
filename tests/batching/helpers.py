"""The whole of a micro-batch that context parallelism divided."""

from collections.abc import Sequence

import torch


def join_context(parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Join the ranks' values: of each sequence, rank r has the r-th chunk from its start and the r-th from its end."""
    if len(parts) == 1:
        return parts[0]
    joined = []
    start = 0
    for length in lengths:
        size = length // (2 * len(parts))
        chunks = [part[start : start + 2 * size].split(size) for part in parts]
        joined += [first for first, _ in chunks] + [last for _, last in reversed(chunks)]
        start += 2 * size
    return torch.cat(joined)
