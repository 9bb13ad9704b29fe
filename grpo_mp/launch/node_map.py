"""Which ranks and engines stand on which node. Pure."""

from collections.abc import Sequence

from grpo_mp.config import Settings
from grpo_mp.distributed.coordinates import data_parallel
from grpo_mp.distributed.layout import describe
from grpo_mp.errors import UserError
from grpo_mp.rollout.placement import EnginePlacement, engine_placements


def node_map(settings: Settings, nodes: Sequence[str], per_node: int) -> str:
    """A line for the layout, then one for each node. Raises UserError where the job is too small for the settings."""
    world_size = len(nodes) * per_node
    layout = settings.layout
    model_parallel = layout.tensor * layout.context * layout.pipeline
    if model_parallel > world_size:
        raise UserError(
            f"layout: tensor x context x pipeline = {model_parallel} needs {-(-model_parallel // per_node)} nodes of "
            f"{per_node} ranks, the allocation has {len(nodes)}: ask for more with sbatch --nodes"
        )
    places = engine_placements(world_size, per_node, settings.engine.gpus, settings.engine.count)
    lines = [f"{world_size} ranks; layout: {describe(layout)}, data={data_parallel(layout, world_size)}"]
    for number, name in enumerate(nodes):
        ranks = range(number * per_node, (number + 1) * per_node)
        lines.append(f"  {name}: ranks {ranks[0]}-{ranks[-1]}; {_engines(places, ranks)}")
    return "\n".join(lines)


def _engines(places: Sequence[EnginePlacement], ranks: range) -> str:
    here = [place for place in places if place.rank in ranks]
    return ", ".join(map(_engine, here)) or "no engine"


def _engine(place: EnginePlacement) -> str:
    part = f", part {place.node_rank} of {place.nodes}" if place.nodes > 1 else ""
    return f"engine {place.engine} (started by rank {place.rank}{part})"
