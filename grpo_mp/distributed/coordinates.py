"""Coordinates of a rank along the parallel dimensions of the layout.

Megatron's order, fastest-varying first: tensor, context, data, pipeline for dense parameters; expert tensor, expert,
expert data, pipeline for experts.

"""

from dataclasses import dataclass

from grpo_mp.config.sections import LayoutConfig


@dataclass(frozen=True)
class RankCoordinates:
    """Coordinates of one rank; `expert_*` apply to expert parameters."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


def data_parallel_size(layout: LayoutConfig, world_size: int) -> int:
    """Return the data-parallel size: the number of replicas of the dense parameters."""
    return world_size // layout.model_parallel


def coordinates(rank: int, layout: LayoutConfig, world_size: int) -> RankCoordinates:
    """Return the coordinates of `rank` among `world_size` ranks. The layout must have passed `check_layout`."""
    pipeline, stage_rank = divmod(rank, world_size // layout.pipeline)
    rest, tensor = divmod(stage_rank, layout.tensor)
    expert_rest, expert_tensor = divmod(stage_rank, layout.expert_tensor)
    return RankCoordinates(
        tensor=tensor,
        context=rest % layout.context,
        data=rest // layout.context,
        pipeline=pipeline,
        expert_tensor=expert_tensor,
        expert=expert_rest % layout.expert,
        expert_data=expert_rest // layout.expert,
    )


def model_parallel_ranks(data: int, layout: LayoutConfig, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a model replica, which train on the same samples: those with data coordinate `data`."""
    return tuple(rank for rank in range(world_size) if coordinates(rank, layout, world_size).data == data)
