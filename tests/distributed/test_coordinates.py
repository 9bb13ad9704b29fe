"""Coordinates against counting ranks out in Megatron's order, and against the groups that Megatron makes."""

import inspect
from collections.abc import Iterator
from itertools import product

import pytest
from megatron.core.parallel_state import RankGenerator, initialize_model_parallel

from grpo_mp.config import Layout
from grpo_mp.distributed.coordinates import RankCoordinates, coordinates, data_parallel, model_parallel_ranks

WORLD_SIZES = (1, 2, 4, 6, 8, 12)


def layouts(world_size: int) -> Iterator[Layout]:
    """All whose dense and expert sizes divide the ranks."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tensor, context, pipeline, expert, expert_tensor in product(sizes, repeat=5):
        if world_size % (tensor * context * pipeline) == 0 == world_size % (expert_tensor * expert * pipeline):
            yield Layout(tensor=tensor, context=context, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor)


def counted(layout: Layout, world_size: int) -> list[RankCoordinates]:
    """Every rank's position: loops from the slowest dimension to the fastest."""
    stages = range(layout.pipeline)
    copies = range(world_size // layout.tensor // layout.context // layout.pipeline)
    expert_copies = range(world_size // layout.expert // layout.expert_tensor // layout.pipeline)
    dense = product(stages, copies, range(layout.context), range(layout.tensor))
    sparse = product(stages, expert_copies, range(layout.expert), range(layout.expert_tensor))
    return [
        RankCoordinates(
            tensor=tensor,
            context=context,
            data=data,
            pipeline=pipeline,
            expert_tensor=expert_tensor,
            expert=expert,
            expert_data=expert_data,
        )
        for (pipeline, data, context, tensor), (_, expert_data, expert, expert_tensor) in zip(
            dense, sparse, strict=True
        )
    ]


def generators(layout: Layout, world_size: int) -> tuple[RankGenerator, RankGenerator]:
    """Megatron's own, for dense and for expert parameters, in its default order."""
    order = inspect.signature(initialize_model_parallel).parameters["order"].default
    tensor, context, pipeline = layout.tensor, layout.context, layout.pipeline
    expert, expert_tensor = layout.expert, layout.expert_tensor
    copies, expert_copies = (
        world_size // (tensor * context * pipeline),
        world_size // (expert * expert_tensor * pipeline),
    )
    return (
        RankGenerator(tp=tensor, ep=1, dp=copies, pp=pipeline, cp=context, order=order),
        RankGenerator(tp=expert_tensor, ep=expert, dp=expert_copies, pp=pipeline, cp=1, order=order),
    )


def positions(generator: RankGenerator, token: str) -> dict[int, int]:
    """Rank -> its place in its group."""
    return {rank: place for group in generator.get_ranks(token) for place, rank in enumerate(group)}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_coordinates_are_counted_out_in_megatron_s_order(world_size: int) -> None:
    for layout in layouts(world_size):
        assert [coordinates(rank, layout, world_size) for rank in range(world_size)] == counted(layout, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_coordinates_are_places_in_megatron_s_groups(world_size: int) -> None:
    for layout in layouts(world_size):
        dense, sparse = generators(layout, world_size)
        tables = {
            "tensor": positions(dense, "tp"),
            "context": positions(dense, "cp"),
            "data": positions(dense, "dp"),
            "pipeline": positions(dense, "pp"),
            "expert_tensor": positions(sparse, "tp"),
            "expert": positions(sparse, "ep"),
            "expert_data": positions(sparse, "dp"),
        }
        for rank in range(world_size):
            assert vars(coordinates(rank, layout, world_size)) == {name: table[rank] for name, table in tables.items()}
        assert data_parallel(layout, world_size) == len(dense.get_ranks("dp")[0])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicas_are_megatron_s_model_parallel_groups(world_size: int) -> None:
    for layout in layouts(world_size):
        replicas = [model_parallel_ranks(data, layout, world_size) for data in range(data_parallel(layout, world_size))]
        groups = generators(layout, world_size)[0].get_ranks("tp-cp-pp")
        assert sorted(replicas) == sorted(tuple(sorted(group)) for group in groups)
