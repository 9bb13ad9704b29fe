"""Which ranks start which processes of which engine."""

from itertools import product

import pytest

from grpo_mp.config.sections import EngineConfig
from grpo_mp.rollout.engine_layout import engine_host_ranks, engine_placements
from grpo_mp.utils.errors import UserError

JOBS = [
    (nodes * ranks_per_node, ranks_per_node, gpus)
    for nodes, ranks_per_node, gpus in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    if gpus <= nodes * ranks_per_node
]


@pytest.mark.parametrize(("world_size", "ranks_per_node", "gpus"), JOBS)
def test_engines_span_consecutive_ranks_with_one_process_for_each_node(
    world_size: int, ranks_per_node: int, gpus: int
) -> None:
    placements = engine_placements(EngineConfig(gpus_per_engine=gpus), world_size, ranks_per_node)
    engine_ranks = [range(engine * gpus, (engine + 1) * gpus) for engine in range(world_size // gpus)]
    for engine, ranks in enumerate(engine_ranks):
        processes = [placement for placement in placements if placement.engine == engine]
        nodes = sorted({rank // ranks_per_node for rank in ranks})
        assert [placement.rank for placement in processes] == [
            min(rank for rank in ranks if rank // ranks_per_node == node) for node in nodes
        ]
        assert [placement.node_rank for placement in processes] == list(range(len(nodes)))
        assert {placement.nodes for placement in processes} == {len(nodes)}
    assert {placement.engine for placement in placements} == set(range(len(engine_ranks)))
    assert len({placement.rank for placement in placements}) == len(placements)
    assert engine_host_ranks(placements) == tuple(ranks[0] for ranks in engine_ranks)


def test_an_engine_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"an engine of engine.gpus_per_engine=16 GPUs does not fit the 8 ranks"):
        engine_placements(EngineConfig(gpus_per_engine=16), 8, 8)


@pytest.mark.parametrize(("ranks_per_node", "gpus"), [(4, 3), (4, 6)])
def test_an_engine_that_would_straddle_nodes_unevenly_is_refused(ranks_per_node: int, gpus: int) -> None:
    with pytest.raises(UserError, match=rf"engine.gpus_per_engine={gpus} and the {ranks_per_node} ranks of a node"):
        engine_placements(EngineConfig(gpus_per_engine=gpus), 12, ranks_per_node)


def test_engines_may_have_the_last_ranks_for_themselves() -> None:
    assert engine_host_ranks(engine_placements(EngineConfig(gpus_per_engine=2, ranks=4), 12, 4)) == (8, 10)
    assert [one.rank for one in engine_placements(EngineConfig(gpus_per_engine=8, ranks=8), 24, 4)] == [16, 20]


@pytest.mark.parametrize(
    ("ranks", "gpus", "message"),
    [
        (8, 2, "engine.ranks=8 leaves none of the 8 ranks of this job to train: lower it"),
        (3, 2, "engine.ranks=3 leaves 5 ranks to train, .* begin at a multiple of 2: set engine.ranks=4"),
        (2, 4, "an engine of engine.gpus_per_engine=4 GPUs does not fit the 2 ranks of engine.ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks: int, gpus: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine_placements(EngineConfig(gpus_per_engine=gpus, ranks=ranks), 8, 4)
