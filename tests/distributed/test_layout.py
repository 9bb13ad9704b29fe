"""Each rule's message; over all small layouts, which are valid; coordinates as Megatron has them."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from megatron.core.parallel_state import RankGenerator, initialize_model_parallel

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import coordinates, data_parallel_size, model_parallel_ranks
from grpo_mp.distributed.layout import ModelShape, check_layout, layout_violations
from grpo_mp.utils.errors import UserError


def model_of(
    moe: tuple[bool, ...], heads: int, kv_heads: int, ffn: int, experts: int = 0, width: int = 0
) -> ModelShape:
    return ModelShape(
        hidden_size=16,
        vocab_size=32,
        num_heads=heads,
        qk_head_dim=4,
        v_head_dim=4,
        num_kv_heads=kv_heads,
        mla_cache_dim=0,
        ffn_hidden_size=ffn,
        is_moe_layer=moe,
        num_experts=experts,
        experts_per_token=0,
        moe_ffn_hidden_size=width,
        shared_expert_size=0,
    )


SPARSE = model_of((False, True, True, True), 4, 2, 12, experts=6, width=4)
DENSE = replace(model_of((False,) * 6, 6, 6, 12), shared_expert_size=18)  # two widths to divide
NAMES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")


def all_layouts(largest: int, layers: int) -> list[LayoutConfig]:
    sizes = range(1, largest + 1)
    chunks = (None, *range(2, layers + 1))
    return [
        LayoutConfig(**dict(zip(NAMES, values, strict=True)))
        for values in product(sizes, sizes, chunks, sizes, sizes, sizes)
    ]


def is_valid(layout: LayoutConfig, model: ModelShape, world_size: int) -> bool:
    """Return whether every size divides evenly over the ranks."""
    chunks = layout.virtual_pipeline or 1
    shares = [
        world_size / (layout.tensor * layout.context * layout.pipeline),
        world_size / (layout.expert * layout.expert_tensor * layout.pipeline),
        model.num_layers / (layout.pipeline * chunks),
        *(part / layout.tensor for part in (model.num_heads, model.num_kv_heads, *model.ffn_widths)),
    ]
    if model.num_experts:
        shares += [model.num_experts / layout.expert, model.moe_ffn_hidden_size / layout.expert_tensor]
    elif layout.expert * layout.expert_tensor > 1:
        return False
    return all(share == int(share) for share in shares) and (chunks == 1 or layout.pipeline > 1)


@pytest.mark.parametrize("model", [SPARSE, DENSE])
@pytest.mark.parametrize("world_size", [1, 4, 6])
def test_valid_layouts(model: ModelShape, world_size: int) -> None:
    layouts = all_layouts(4, model.num_layers)
    valid = [layout for layout in layouts if is_valid(layout, model, world_size)]
    without_violation = [
        layout for layout in layouts if next(layout_violations(layout, model, world_size), None) is None
    ]
    assert without_violation == valid


@pytest.mark.parametrize(
    ("sizes", "model", "message"),
    [
        ({"tensor": 3}, SPARSE, "tensor x context x pipeline = 3 does not divide the 8 ranks"),
        ({"expert": 3}, SPARSE, "expert_tensor x expert x pipeline = 3 does not divide the 8 ranks"),
        ({"tensor": 4}, SPARSE, "tensor=4 does not divide the 2 query groups"),
        ({"tensor": 4}, model_of((False,) * 4, 4, 4, 6), "tensor=4 does not divide the MLP width 6"),
        (
            {"pipeline": 2, "virtual_pipeline": 3},
            SPARSE,
            "pipeline x virtual_pipeline = 6 does not divide the 4 layers",
        ),
        ({"virtual_pipeline": 2}, SPARSE, "virtual_pipeline needs pipeline > 1"),
        ({"expert": 2}, DENSE, "expert and expert_tensor must be 1: the model has no experts"),
        ({"expert": 4}, SPARSE, "expert=4 does not divide the 6 experts"),
        ({"expert_tensor": 8}, SPARSE, "expert_tensor=8 does not divide the expert width 4"),
    ],
)
def test_each_rule_has_its_message(sizes: dict[str, Any], model: ModelShape, message: str) -> None:
    layout = LayoutConfig(**sizes)
    assert message in list(layout_violations(layout, model, 8))
    with pytest.raises(UserError, match=r"^layout: .*choose other sizes \(tensor=\d, .*expert_tensor=\d\)$"):
        check_layout(layout, model, 8)


def test_a_single_rank_is_told_how_many_the_layout_takes() -> None:
    layout = LayoutConfig(tensor=2, expert=4)
    with pytest.raises(UserError, match=r"start 4 ranks or a multiple \(grpo-mp train CONFIG --ranks 4\), or choose"):
        check_layout(layout, SPARSE, 1)


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
    tensor = layout.tensor
    context = layout.context
    pipeline = layout.pipeline
    expert = layout.expert
    expert_tensor = layout.expert_tensor
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
