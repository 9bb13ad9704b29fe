"""What DeepSeek's families have otherwise than Megatron: the ranking of expert groups, queries without a norm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from grpo_mp.utils.errors import UserError

Topk = Callable[..., tuple[Tensor, Tensor]]  # of Megatron: scores, top-k, number of groups, top-k of them


@dataclass(frozen=True)
class GroupLimitedTopk:
    """Replaces the top-k of Megatron's routers, as a `router_replay`. `group_score_topk`: experts that rank a group.

    Megatron ranks a group by the sum of its best topk // group_topk experts; DeepSeek-V2 always by its best one,
    DeepSeek-V3 by its best two.
    """

    group_score_topk: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk: Topk
    ) -> tuple[Tensor, Tensor]:
        """Return the top-k scores and experts of `scores` [T, experts], [T, topk] each."""
        by_group = scores.unflatten(1, (num_groups, -1))
        group_scores = by_group.topk(self.group_score_topk, dim=2).values.sum(2)
        masked = torch.ones_like(group_scores).scatter(1, group_scores.topk(group_topk, dim=1).indices, 0.0).bool()
        values, experts = by_group.masked_fill(masked[:, :, None], -float("inf")).flatten(1).topk(topk, dim=1)
        return values, experts


def set_group_ranking(model: nn.Module, group_score_topk: int) -> None:
    """Rank groups by their `group_score_topk` best experts in the routers for which Megatron would do otherwise."""
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        group_topk = router.config.moe_router_group_topk
        if not group_topk or router.topk // group_topk == group_score_topk:
            continue
        if router.config.moe_router_fusion:
            raise UserError(
                "training.megatron_args.moe_router_fusion: fused routing ranks this model's groups differently"
            )
        router.router_replay = GroupLimitedTopk(group_score_topk)


class MLAWithoutQueryNorm(MLASelfAttention):
    """Keeps the query projection of the layer spec: no low-rank queries, hence no norm (DeepSeek-V2-Lite, Moonlight).

    megatron-core 0.19 would add a norm to it, because qk_layernorm asks for one of keys and values; 0.16 never calls
    this hook.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        return resolved | {"linear_q_proj": submodules.linear_q_proj}


def use_mla_without_query_norm(config: TransformerConfig, block: ModuleSpec) -> None:
    """Use MLAWithoutQueryNorm in the block's spec if the model has no low-rank queries."""
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = MLAWithoutQueryNorm
