"""Coordinates of a rank along the parallel dimensions of the layout, and what follows: shards and communicators.

Megatron's order, fastest-varying first: tensor, context, data, pipeline for dense parameters; expert tensor, expert,
expert data, pipeline for experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.models.mapping import Param

WORLD = "WORLD"  # torch's default group: weight sync, checkpoints
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"


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


def tensor_part(param: Param, coords: RankCoordinates) -> int:
    """Return the index of the tensor-parallel part of `param` that a rank holds; 0 if it is replicated."""
    if param.tp_dim is None:
        return 0
    return coords.expert_tensor if param.expert is not None else coords.tensor


def tp_size(param: Param, layout: LayoutConfig) -> int:
    """Return the number of tensor-parallel parts of `param`; 1 if it is replicated."""
    if param.tp_dim is None:
        return 1
    return layout.expert_tensor if param.expert is not None else layout.tensor


@dataclass(frozen=True)
class Communicator:
    """A process group of several ranks. `group`: its name in Megatron; `stride`: difference of adjacent ranks."""

    group: str
    ranks: int
    stride: int

    def fits_in(self, gpus_per_node: int) -> bool:
        return self.ranks * self.stride <= gpus_per_node


def communicators(layout: LayoutConfig, world_size: int, has_experts: bool, tied: bool) -> tuple[Communicator, ...]:
    """Return the communicators of one training rank.

    torch creates a communicator when its group is first used, and most Megatron groups never are. `tied`: the last
    stage has a copy of the embedding, for its output layer or a multi-token-prediction layer.
    """
    return tuple(group for group in _groups(layout, world_size, has_experts, tied) if group.ranks > 1)


def _groups(layout: LayoutConfig, world_size: int, has_experts: bool, tied: bool) -> Iterator[Communicator]:
    data = data_parallel_size(layout, world_size)
    stage = world_size // layout.pipeline
    yield Communicator(WORLD, world_size, 1)
    yield Communicator("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", world_size, 1)  # gradient norm
    yield Communicator("DATA_PARALLEL_GROUP_WITH_CP", data * layout.context, layout.tensor)
    yield Communicator("TENSOR_MODEL_PARALLEL_GROUP", layout.tensor, 1)
    yield Communicator("CONTEXT_PARALLEL_GROUP", layout.context, layout.tensor)
    yield Communicator(PIPELINE, layout.pipeline, stage)
    if tied and layout.pipeline > 1:  # first and last stage all-reduce the embedding gradient
        yield Communicator("EMBEDDING_GROUP", 2, stage * (layout.pipeline - 1))
    if has_experts:
        yield from _expert_groups(layout, stage)


def _expert_groups(layout: LayoutConfig, stage: int) -> Iterator[Communicator]:
    divided = layout.expert * layout.expert_tensor
    # Megatron-Core 0.19 all-reduces the tokens per expert in this group if routers have a bias.
    yield Communicator("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", stage, 1)
    yield Communicator("EXPERT_MODEL_PARALLEL_GROUP", layout.expert, layout.expert_tensor)
    yield Communicator("EXPERT_TENSOR_PARALLEL_GROUP", layout.expert_tensor, 1)
    yield Communicator("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", divided, 1)  # token counts per expert
    if layout.expert > 1 or layout.expert_tensor != layout.tensor:
        yield Communicator("EXPERT_DATA_PARALLEL_GROUP", stage // divided, divided)
