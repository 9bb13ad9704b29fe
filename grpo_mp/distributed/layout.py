"""The rules a layout must obey, each with the sentence a user reads when it is broken."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from grpo_mp.config import Layout
from grpo_mp.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """What the rules need to know of the model."""

    layers: int
    attention_heads: int
    query_groups: int
    ffn_widths: tuple[int, ...]  # widths that tensor parallelism divides
    experts: int = 0
    expert_width: int = 0


def model_shape(family: dict[str, Any]) -> ModelShape:
    """What the layout rules need, from a family's Megatron settings."""
    experts = family.get("num_moe_experts") or 0
    dense = not experts or 0 in family["moe_layer_freq"]
    widths = [family["ffn_hidden_size"]] if dense else []
    if family.get("moe_shared_expert_intermediate_size"):
        widths.append(family["moe_shared_expert_intermediate_size"])
    return ModelShape(
        layers=family["num_layers"],
        attention_heads=family["num_attention_heads"],
        query_groups=family["num_query_groups"],
        ffn_widths=tuple(widths),
        experts=experts,
        expert_width=family.get("moe_ffn_hidden_size") or 0,
    )


def sets_pipeline_layout(megatron: Mapping[str, Any]) -> bool:
    """Whether optimizer.megatron places the layers on pipeline stages itself."""
    return any("pipeline" in name for name in megatron)


def broken_rules(layout: Layout, model: ModelShape, world_size: int, uneven_pipeline: bool = False) -> Iterator[str]:
    """Every rule that the layout breaks, as one sentence each; nothing if it is valid.

    `uneven_pipeline`: Megatron's own settings place the layers, so they need not divide evenly.
    """
    dense = layout.tensor * layout.context * layout.pipeline
    if world_size % dense:
        yield f"tensor x context x pipeline = {dense} does not divide the {world_size} ranks"
    sparse = layout.expert_tensor * layout.expert * layout.pipeline
    if world_size % sparse:
        yield f"expert_tensor x expert x pipeline = {sparse} does not divide the {world_size} ranks"
    for name, size in (("attention heads", model.attention_heads), ("query groups", model.query_groups)):
        if size % layout.tensor:
            yield f"tensor={layout.tensor} does not divide the {size} {name}"
    for width in model.ffn_widths:
        if width % layout.tensor:
            yield f"tensor={layout.tensor} does not divide the MLP width {width}"
    chunks = layout.pipeline * (layout.virtual_pipeline or 1)
    if not uneven_pipeline and model.layers % chunks:
        yield f"pipeline x virtual_pipeline = {chunks} does not divide the {model.layers} layers"
    if layout.virtual_pipeline and layout.pipeline == 1:
        yield "virtual_pipeline needs pipeline > 1"
    yield from _broken_expert_rules(layout, model)


def _broken_expert_rules(layout: Layout, model: ModelShape) -> Iterator[str]:
    if not model.experts:
        if layout.expert > 1 or layout.expert_tensor > 1:
            yield "expert and expert_tensor must be 1: the model has no experts"
        return
    if model.experts % layout.expert:
        yield f"expert={layout.expert} does not divide the {model.experts} experts"
    if model.expert_width % layout.expert_tensor:
        yield f"expert_tensor={layout.expert_tensor} does not divide the expert width {model.expert_width}"


def check_layout(layout: Layout, model: ModelShape, world_size: int, uneven_pipeline: bool = False) -> None:
    """Raise UserError naming the first broken rule and the nearest valid layout."""
    broken = next(broken_rules(layout, model, world_size, uneven_pipeline), None)
    if broken is None:
        return
    nearest = nearest_layout(layout, model, world_size)
    advice = f"the nearest valid layout is {describe(nearest)}" if nearest else "no layout fits this many ranks"
    raise UserError(f"layout: {broken}; {advice}")


def nearest_layout(layout: Layout, model: ModelShape, world_size: int) -> Layout | None:
    """The valid layout with the smallest sum of factors between its sizes and the wanted ones."""
    valid = (
        candidate
        for candidate in _candidates(layout, model, world_size)
        if next(broken_rules(candidate, model, world_size), None) is None
    )
    return min(valid, key=lambda candidate: _distance(candidate, layout), default=None)


def describe(layout: Layout) -> str:
    """'tensor=2, pipeline=1, ...' as it is written in the settings file."""
    return ", ".join(f"{name}={value}" for name, value in layout.model_dump().items() if value is not None)


def _candidates(layout: Layout, model: ModelShape, world_size: int) -> Iterator[Layout]:
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    experts = sizes if model.experts else [1]
    virtual = [None, *(chunks for chunks in range(2, model.layers + 1) if model.layers % chunks == 0)]
    dense = [three for three in product(sizes, repeat=3) if world_size % prod(three) == 0]
    for (tensor, pipeline, context), expert, expert_tensor, chunks in product(dense, experts, experts, virtual):
        yield Layout(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=chunks,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
        )


def _distance(one: Layout, other: Layout) -> tuple[float, tuple[int, ...]]:
    mine = tuple(value or 1 for value in one.model_dump().values())
    theirs = tuple(value or 1 for value in other.model_dump().values())
    return sum(max(a, b) / min(a, b) for a, b in zip(mine, theirs, strict=True)), mine
