"""Where a rank stands in the layout: its coordinate along every parallel dimension.

Megatron's order, fastest first: tensor, context, data, pipeline for dense parameters;
expert-tensor, expert, expert-data, pipeline for experts.
"""

from dataclasses import dataclass

from grpo_mp.config import Layout


@dataclass(frozen=True)
class RankCoordinates:
    """Position of one rank; `expert_*` is the same rank seen by the expert parameters."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


def data_parallel(layout: Layout, world_size: int) -> int:
    """How many times the dense parameters are replicated."""
    return world_size // (layout.tensor * layout.context * layout.pipeline)


def coordinates(rank: int, layout: Layout, world_size: int) -> RankCoordinates:
    """Position of `rank` in a job of `world_size` ranks; the layout must have passed `check_layout`."""
    per_stage = world_size // layout.pipeline
    pipeline, inside = divmod(rank, per_stage)
    tensor, rest = inside % layout.tensor, inside // layout.tensor
    expert_tensor, expert_rest = inside % layout.expert_tensor, inside // layout.expert_tensor
    return RankCoordinates(
        tensor=tensor,
        context=rest % layout.context,
        data=rest // layout.context,
        pipeline=pipeline,
        expert_tensor=expert_tensor,
        expert=expert_rest % layout.expert,
        expert_data=expert_rest // layout.expert,
    )


def model_parallel_ranks(data: int, layout: Layout, world_size: int) -> tuple[int, ...]:
    """Ranks that train on the same samples: all tensor, context and pipeline coordinates of one data rank."""
    return tuple(rank for rank in range(world_size) if coordinates(rank, layout, world_size).data == data)
