"""Which rank holds which shard of which parameter. Pure."""

from collections.abc import Mapping, Sequence

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import RankCoordinates, coordinates
from grpo_mp.models.mapping import Param


def tensor_part(param: Param, coords: RankCoordinates) -> int:
    """Return which tensor-parallel part of `param` a rank holds; 0 where it is not split."""
    if param.tp_dim is None:
        return 0
    return coords.expert_tensor if param.expert is not None else coords.tensor


def tp_size(param: Param, layout: LayoutConfig) -> int:
    """Return into how many parts tensor parallelism splits `param`; 1 where it is replicated."""
    if param.tp_dim is None:
        return 1
    return layout.expert_tensor if param.expert is not None else layout.tensor


def shards_by_rank(
    params: Mapping[str, Param], layout: LayoutConfig, world_size: int, stage_layers: Sequence[Sequence[int]]
) -> list[dict[str, int]]:
    """Return for each rank the part that it holds of each of its parameters. `stage_layers`: of each pipeline stage."""
    stage_of = {layer: stage for stage, layers in enumerate(stage_layers) for layer in layers}
    last = layout.pipeline - 1
    shards = []
    for rank in range(world_size):
        coords = coordinates(rank, layout, world_size)
        held = {}
        for name, param in params.items():
            outside = 0 if name.startswith("embedding") else last
            stage = outside if param.layer is None else stage_of[param.layer]
            local = param.expert is None or param.expert * layout.expert // param.experts == coords.expert
            if stage == coords.pipeline and local:
                held[name] = tensor_part(param, coords)
        shards.append(held)
    return shards
