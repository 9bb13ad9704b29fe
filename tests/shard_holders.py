"""The ranks that hold each part of a parameter, from the layout alone."""

from collections.abc import Mapping, Sequence
from functools import cache

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.models.mapping import Param


def shard_holders(
    params: Mapping[str, Param], layout: LayoutConfig, world_size: int, stage_layers: Sequence[Sequence[int]]
) -> dict[str, dict[int, list[int]]]:
    """Return the ranks that hold each part of each parameter: name -> part -> ranks.

    `stage_layers`: layers of each pipeline stage.
    """
    stage_of = {layer: stage for stage, layers in enumerate(stage_layers) for layer in layers}
    all_coords = [coordinates(rank, layout, world_size) for rank in range(world_size)]

    @cache
    def ranks_by_part(stage: int, expert_rank: int | None, divided: bool) -> dict[int, list[int]]:
        held: dict[int, list[int]] = {}
        for rank, coords in enumerate(all_coords):
            if coords.pipeline == stage and expert_rank in (None, coords.expert):
                part = coords.tensor if expert_rank is None else coords.expert_tensor
                held.setdefault(part if divided else 0, []).append(rank)
        return held

    holders = {}
    for name, param in params.items():
        # Outside the layers: the embedding is on the first stage; its copy, final norm and output layer on the last.
        outside = 0 if name.startswith("embedding") else layout.pipeline - 1
        stage = outside if param.layer is None else stage_of[param.layer]
        expert_rank = None if param.expert is None else param.expert * layout.expert // param.experts
        holders[name] = ranks_by_part(stage, expert_rank, param.tp_dim is not None)
    return holders
