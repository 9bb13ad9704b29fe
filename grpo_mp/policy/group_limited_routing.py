"""Experts from few groups, where a family ranks groups otherwise than Megatron does.

Megatron ranks a group by the sum of its best topk // group_topk experts; DeepSeek-V2 by its best one, DeepSeek-V3
by its best two, whatever the other numbers are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from grpo_mp.errors import UserError


@dataclass(frozen=True)
class GroupRouting:
    """Stands where Megatron's routers ask which experts to replay. `best`: of a group, whose scores rank it."""

    best: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk: Callable[..., object]
    ) -> tuple[Tensor, Tensor]:
        """Scores [T, experts] -> the chosen scores and experts, [T, topk] both."""
        by_group = scores.unflatten(1, (num_groups, -1))
        rank = by_group.topk(self.best, dim=2).values.sum(2)
        closed = torch.ones_like(rank).scatter(1, rank.topk(group_topk, dim=1).indices, 0.0).bool()
        values, experts = by_group.masked_fill(closed[:, :, None], -float("inf")).flatten(1).topk(topk, dim=1)
        return values, experts


def rank_groups_by(best: int, model: nn.Module) -> None:
    """Give the model's routers this ranking where Megatron's is another.

    Raises UserError where fused routing, which has Megatron's, was asked for.
    """
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        chosen = router.config.moe_router_group_topk
        if not chosen or router.topk // chosen == best:
            continue
        if router.config.moe_router_fusion:
            raise UserError("optimizer.megatron.moe_router_fusion: fused routing ranks this model's groups otherwise")
        router.router_replay = GroupRouting(best)
