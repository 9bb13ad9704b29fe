"""Which ranks and engines are on which node. Pure."""

from collections.abc import Sequence

from grpo_mp.config import Settings
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.errors import UserError
from grpo_mp.rollout.placement import EnginePlacement, engine_placements


def node_map(settings: Settings, nodes: Sequence[str], ranks_per_node: int) -> str:
    """Return a line for the layout, then one for each node.

    Raises UserError where the job is too small for the settings.
    """
    world_size = len(nodes) * ranks_per_node
    layout = settings.layout
    model_parallel = layout.tensor * layout.context * layout.pipeline
    if model_parallel > world_size:
        raise UserError(
            f"layout: tensor x context x pipeline = {model_parallel} needs {-(-model_parallel // ranks_per_node)} "
            f"nodes of {ranks_per_node} ranks, the allocation has {len(nodes)}: ask for more with sbatch --nodes"
        )
    placements = engine_placements(world_size, ranks_per_node, settings.engine.gpus, settings.engine.count)
    lines = [f"{world_size} ranks; layout: {describe_parallelism(layout, world_size)}"]
    for index, name in enumerate(nodes):
        ranks = range(index * ranks_per_node, (index + 1) * ranks_per_node)
        engines = [_describe_engine(placement) for placement in placements if placement.rank in ranks]
        lines.append(f"  {name}: ranks {ranks[0]}-{ranks[-1]}; {', '.join(engines) or 'no engine'}")
    return "\n".join(lines)


def _describe_engine(placement: EnginePlacement) -> str:
    part = f", part {placement.node_rank} of {placement.nodes}" if placement.nodes > 1 else ""
    return f"engine {placement.engine} (started by rank {placement.rank}{part})"
