"""Rewards to advantages, always by group id: uneven groups are legal, order means nothing."""

from collections.abc import Sequence

import torch


def group_advantages(
    rewards: Sequence[float], group_ids: Sequence[int], normalise_std: bool, eps: float
) -> tuple[float, ...]:
    """A_i = (r_i - mean) / (std + eps) over the samples of the same group (DeepSeekMath, section 4.1.2).

    The standard deviation is that of the sample (n - 1), as TRL computes it. A group without difference,
    or of one sample, gives exactly zero. Computed in float64.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    values = torch.tensor(rewards, dtype=torch.float64)
    _, group = torch.tensor(group_ids, dtype=torch.int64).unique(return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    count = torch.zeros(groups, dtype=torch.float64).index_add(0, group, torch.ones_like(values))
    mean = torch.zeros_like(count).index_add(0, group, values) / count
    centred = values - mean[group]
    if normalise_std:
        variance = torch.zeros_like(count).index_add(0, group, centred**2) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + eps)
    centred[~_differs(values, group, groups)[group]] = 0.0
    return tuple(centred.tolist())


def groups_without_difference(rewards: Sequence[float], group_ids: Sequence[int]) -> float:
    """Share of groups whose samples all have the same reward: they teach nothing."""
    values = torch.tensor(rewards, dtype=torch.float64)
    _, group = torch.tensor(group_ids, dtype=torch.int64).unique(return_inverse=True)
    groups = int(group.max()) + 1
    return 1.0 - float(_differs(values, group, groups).double().mean())


def _differs(values: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    low = torch.full((groups,), torch.inf, dtype=values.dtype).scatter_reduce(0, group, values, "amin")
    high = torch.full((groups,), -torch.inf, dtype=values.dtype).scatter_reduce(0, group, values, "amax")
    return high > low
