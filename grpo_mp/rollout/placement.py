"""Which ranks host which engine. Pure."""

from dataclasses import dataclass

from grpo_mp.config.sections import EngineConfig
from grpo_mp.utils.errors import UserError


@dataclass(frozen=True)
class EnginePlacement:
    """One process of an engine: the ranks of one node that it spans. `node_rank` 0 is the engine host."""

    engine: int
    rank: int  # starts the process
    node_rank: int
    nodes: int

    @property
    def is_host(self) -> bool:
        """Return whether this process is the one that serves requests."""
        return self.node_rank == 0


def engine_placements(engine: EngineConfig, world_size: int, ranks_per_node: int) -> tuple[EnginePlacement, ...]:
    """Place engine e on ranks [e * gpus, (e + 1) * gpus) of those that may host engines, with one process on each node.

    These are all ranks, or the last `engine.ranks`. Raises UserError where the engines do not fit the job or would span
    nodes unevenly.
    """
    gpus, ranks = engine.gpus_per_engine, engine.ranks or world_size
    first = world_size - ranks
    if engine.ranks and first < 1:
        raise UserError(f"engine.ranks={ranks} leaves none of the {world_size} ranks of this job to train: lower it")
    engines = engine.num_engines or ranks // gpus
    if engines < 1 or engines * gpus > ranks:
        which = "of engine.ranks" if engine.ranks else "of this job"
        if engines <= 1:
            raise UserError(f"an engine of engine.gpus_per_engine={gpus} GPUs does not fit the {ranks} ranks {which}")
        raise UserError(
            f"engine.num_engines={engines} engines of engine.gpus_per_engine={gpus} do not fit the {ranks} ranks "
            f"{which}"
        )
    part = min(gpus, ranks_per_node)
    if first % part:
        raise UserError(
            f"engine.ranks={ranks} leaves {first} ranks to train, and engines of {gpus} begin at a multiple of {part}: "
            f"set engine.ranks={world_size - first // part * part}"
        )
    if max(gpus, ranks_per_node) % min(gpus, ranks_per_node):
        raise UserError(
            f"engine.gpus_per_engine={gpus} and the {ranks_per_node} ranks of a node do not divide each other"
        )
    nodes = max(1, gpus // ranks_per_node)
    return tuple(
        EnginePlacement(index, first + index * gpus + node * ranks_per_node, node, nodes)
        for index in range(engines)
        for node in range(nodes)
    )


def engine_host_ranks(placements: tuple[EnginePlacement, ...]) -> tuple[int, ...]:
    """List the ranks that talk to an engine, in engine order."""
    return tuple(placement.rank for placement in placements if placement.is_host)
