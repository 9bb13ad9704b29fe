"""Rules that a layout must obey, each with its error message."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import lcm, prod
from typing import Any

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import data_parallel
from grpo_mp.errors import UserError

FIRST_STAGE_LAYERS = "num_layers_in_first_pipeline_stage"
LAST_STAGE_LAYERS = "num_layers_in_last_pipeline_stage"
PIPELINE_LAYOUT = "pipeline_model_parallel_layout"
# Fields of Megatron's TransformerConfig that place the layers.
PLACEMENT_FIELDS = {
    FIRST_STAGE_LAYERS,
    LAST_STAGE_LAYERS,
    PIPELINE_LAYOUT,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}


@dataclass(frozen=True)
class ModelShape:
    """Hold the sizes of the model that a layout divides."""

    layers: int
    attention_heads: int
    query_groups: int
    ffn_widths: tuple[int, ...]  # widths that tensor parallelism divides
    experts: int = 0
    expert_width: int = 0


def model_shape(family: dict[str, Any]) -> ModelShape:
    """Return the model's sizes from its family's Megatron config fields."""
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
    """Tell whether training.megatron_args places the layers on pipeline stages itself."""
    return not PLACEMENT_FIELDS.isdisjoint(megatron)


def layout_violations(
    layout: LayoutConfig, model: ModelShape, world_size: int, uneven_pipeline: bool = False
) -> Iterator[str]:
    """Yield one message for each rule that the layout breaks.

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
    if not model.experts:
        if layout.expert > 1 or layout.expert_tensor > 1:
            yield "expert and expert_tensor must be 1: the model has no experts"
        return
    if model.experts % layout.expert:
        yield f"expert={layout.expert} does not divide the {model.experts} experts"
    if model.expert_width % layout.expert_tensor:
        yield f"expert_tensor={layout.expert_tensor} does not divide the expert width {model.expert_width}"


def check_layout(layout: LayoutConfig, model: ModelShape, world_size: int, uneven_pipeline: bool = False) -> None:
    """Raise UserError naming the first broken rule, and the nearest valid layout or how many ranks to start."""
    violation = next(layout_violations(layout, model, world_size, uneven_pipeline), None)
    if violation is None:
        return
    nearest = nearest_layout(layout, model, world_size)
    advice = f"the nearest valid layout is {describe(nearest)}" if nearest else "no layout fits this many ranks"
    fewest = lcm(
        layout.tensor * layout.context * layout.pipeline, layout.expert_tensor * layout.expert * layout.pipeline
    )
    if world_size == 1 < fewest:  # nobody said how many to start
        advice = f"start {fewest} ranks or a multiple (grpo-mp train CONFIG --ranks {fewest}), or {advice}"
    raise UserError(f"layout: {violation}; {advice}")


def nearest_layout(layout: LayoutConfig, model: ModelShape, world_size: int) -> LayoutConfig | None:
    """Return the valid layout whose sizes differ from those of `layout` by the smallest sum of factors."""

    def sizes(candidate: LayoutConfig) -> tuple[int, ...]:
        return tuple(value or 1 for value in candidate.model_dump().values())

    def distance(candidate: LayoutConfig) -> tuple[float, tuple[int, ...]]:
        """Return the sum of factors between the sizes, and the candidate's sizes to break ties."""
        pairs = zip(sizes(candidate), sizes(layout), strict=True)
        return sum(max(a, b) / min(a, b) for a, b in pairs), sizes(candidate)

    valid = (
        candidate
        for candidate in _candidates(layout, model, world_size)
        if next(layout_violations(candidate, model, world_size), None) is None
    )
    return min(valid, key=distance, default=None)


def describe(layout: LayoutConfig) -> str:
    """Return 'tensor=2, pipeline=1, ...', as in the settings file."""
    return ", ".join(f"{name}={value}" for name, value in layout.model_dump().items() if value is not None)


def describe_parallelism(layout: LayoutConfig, world_size: int) -> str:
    """Return the layout with the data parallelism that `world_size` ranks leave: 'tensor=2, ..., data=4'."""
    return f"{describe(layout)}, data={data_parallel(layout, world_size)}"


def _candidates(layout: LayoutConfig, model: ModelShape, world_size: int) -> Iterator[LayoutConfig]:
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    experts = sizes if model.experts else [1]
    virtual = [None, *(chunks for chunks in range(2, model.layers + 1) if model.layers % chunks == 0)]
    dense = [triple for triple in product(sizes, repeat=3) if world_size % prod(triple) == 0]
    for (tensor, pipeline, context), expert, expert_tensor, chunks in product(dense, experts, experts, virtual):
        yield LayoutConfig(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=chunks,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
        )
