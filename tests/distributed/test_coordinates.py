"""Coordinates against Megatron's RankGenerator."""

import inspect
from collections.abc import Iterator
from itertools import product

import pytest
from megatron.core.parallel_state import RankGenerator, initialize_model_parallel

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import coordinates, data_parallel_size, model_parallel_ranks

WORLD_SIZES = (1, 2, 4, 6, 8, 12)


def layouts(world_size: int) -> Iterator[LayoutConfig]:
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tensor, context, pipeline, expert, expert_tensor in product(sizes, repeat=5):
        if world_size % (tensor * context * pipeline) == 0 == world_size % (expert_tensor * expert * pipeline):
            yield LayoutConfig(
                tensor=tensor, context=context, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor
            )


def rank_generators(layout: LayoutConfig, world_size: int) -> tuple[RankGenerator, RankGenerator]:
    """Return Megatron's generators for dense and for expert parameters, in its default order."""
    order = inspect.signature(initialize_model_parallel).parameters["order"].default
    tensor, context, pipeline = layout.tensor, layout.context, layout.pipeline
    expert, expert_tensor = layout.expert, layout.expert_tensor
    data = world_size // (tensor * context * pipeline)
    expert_data = world_size // (expert * expert_tensor * pipeline)
    return (
        RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order),
        RankGenerator(tp=expert_tensor, ep=expert, dp=expert_data, pp=pipeline, cp=1, order=order),
    )


def group_ranks(generator: RankGenerator, token: str) -> dict[int, int]:
    return {rank: group_rank for group in generator.get_ranks(token) for group_rank, rank in enumerate(group)}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_coordinates_are_ranks_in_megatron_groups(world_size: int) -> None:
    for layout in layouts(world_size):
        dense, sparse = rank_generators(layout, world_size)
        expected = {
            "tensor": group_ranks(dense, "tp"),
            "context": group_ranks(dense, "cp"),
            "data": group_ranks(dense, "dp"),
            "pipeline": group_ranks(dense, "pp"),
            "expert_tensor": group_ranks(sparse, "tp"),
            "expert": group_ranks(sparse, "ep"),
            "expert_data": group_ranks(sparse, "dp"),
        }
        for rank in range(world_size):
            assert vars(coordinates(rank, layout, world_size)) == {
                name: ranks[rank] for name, ranks in expected.items()
            }
        assert data_parallel_size(layout, world_size) == len(dense.get_ranks("dp")[0])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicas_are_megatron_model_parallel_groups(world_size: int) -> None:
    for layout in layouts(world_size):
        replicas = [
            model_parallel_ranks(data, layout, world_size) for data in range(data_parallel_size(layout, world_size))
        ]
        groups = rank_generators(layout, world_size)[0].get_ranks("tp-cp-pp")
        assert sorted(replicas) == sorted(tuple(sorted(group)) for group in groups)
