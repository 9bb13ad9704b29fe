"""Differences of DeepSeek's families from Megatron's modules: the ranking of expert groups, latent attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from grpo_mp import platform
from grpo_mp.utils.errors import UserError

HOPPER = 9.0  # compute capability

Topk = Callable[..., tuple[Tensor, Tensor]]  # Megatron's top-k function: (scores, topk, num_groups, group_topk)


@dataclass(frozen=True)
class GroupLimitedTopk:
    """Group-limited top-k for Megatron's routers, plugged in as their `router_replay`.

    A group's score is the sum of its `group_score_topk` best expert scores: 1 in DeepSeek-V2, 2 in DeepSeek-V3, and
    topk // group_topk in Megatron.
    """

    group_score_topk: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk: Topk
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the indices of the chosen experts, [T, topk] each. `scores`: [T, experts]."""
        by_group = scores.unflatten(1, (num_groups, -1))
        group_scores = by_group.topk(self.group_score_topk, dim=2).values.sum(2)
        masked = torch.ones_like(group_scores).scatter(1, group_scores.topk(group_topk, dim=1).indices, 0.0).bool()
        values, experts = by_group.masked_fill(masked[:, :, None], -float("inf")).flatten(1).topk(topk, dim=1)
        return values, experts


def set_group_ranking(model: nn.Module, group_score_topk: int) -> None:
    """Make all routers of `model` rank expert groups by their `group_score_topk` best experts."""
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        group_topk = router.config.moe_router_group_topk
        if not group_topk or router.topk // group_topk == group_score_topk:
            continue  # no groups, or Megatron already ranks them so
        if router.config.moe_router_fusion:
            raise UserError(
                "training.megatron_args.moe_router_fusion: fused routing ranks this model's groups differently"
            )
        router.router_replay = GroupLimitedTopk(group_score_topk)


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention without an extra query norm and without padded values.

    With qk_layernorm, megatron-core 0.19 adds a norm to uncompressed query projections, which DeepSeek-V2-Lite and
    Moonlight do not have. It also pads values to the head size of the keys (128 to 192), a sixth of attention's
    operations, which Hopper's kernels do not need. Version 0.16 does neither and calls none of these hooks.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        return resolved if self.config.q_lora_rank else resolved | {"linear_q_proj": submodules.linear_q_proj}

    def _run_core_attention(self, *inputs: Any, attn_mask_type: Any = None, **options: Any) -> Tensor:
        capability = platform.compute_capability()
        needs_padding = capability is not None and capability < HOPPER
        attend = super()._run_core_attention if needs_padding else self.core_attention
        output: Tensor = attend(*inputs, attn_mask_type=attn_mask_type or self.attn_mask_type, **options)
        return output


def use_latent_attention(config: TransformerConfig, block: ModuleSpec) -> None:
    """Set LatentAttention in the spec of each layer of `block` if the model has latent attention to all keys."""
    if config.multi_latent_attention and not config.experimental_attention_variant:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = LatentAttention
