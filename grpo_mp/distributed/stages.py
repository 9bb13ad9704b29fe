"""Layers of pipeline stages."""

import re
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.layout import (
    FIRST_STAGE_LAYERS,
    LAST_STAGE_LAYERS,
    PIPELINE_LAYOUT,
    ModelShape,
    check_stages,
)
from grpo_mp.utils.errors import UserError, read_number

StageLayers = tuple[tuple[int, ...], ...]  # [stage]: the stage's layers, over all its virtual chunks


def layers_of_stages(num_layers: int, layout: LayoutConfig, megatron: Mapping[str, Any]) -> StageLayers:
    """Return the layers of each pipeline stage."""
    if megatron.get(PIPELINE_LAYOUT):
        chunks = _parse_pipeline_layout(megatron[PIPELINE_LAYOUT])
    else:
        first, last = (
            None if megatron.get(name) is None else read_number(int, megatron[name], f"training.megatron_args.{name}")
            for name in (FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS)
        )
        chunks = _even_chunks(num_layers, layout, first, last)
    if len(chunks) % layout.pipeline or sum(chunks) != num_layers or min(chunks) < 0:
        raise UserError(
            f"training.megatron_args places {sum(chunks)} layers on {len(chunks)} stages {chunks}, the model has "
            f"{num_layers} and layout.pipeline={layout.pipeline}: make the numbers equal"
        )
    check_stages(layout, len(chunks))
    bounds = list(pairwise(accumulate(chunks, initial=0)))
    return tuple(
        tuple(layer for start, end in bounds[stage :: layout.pipeline] for layer in range(start, end))
        for stage in range(layout.pipeline)
    )


def check_index_share(model: ModelShape, layout: LayoutConfig, megatron: Mapping[str, Any]) -> None:
    """Raise UserError if a stage begins with a layer without an indexer: Megatron sends no choice of keys to it."""
    if model.indexer is None or len(model.indexer.layers) == model.num_layers:
        return
    starts = ", ".join(map(str, sorted(model.indexer.layers)))
    for stage, layers in enumerate(layers_of_stages(model.num_layers, layout, megatron)):
        for layer in set(layers) - model.indexer.layers:
            if layer - 1 not in layers:
                raise UserError(
                    f"pipeline stage {stage} begins with layer {layer}, which has no indexer and needs the keys chosen "
                    f"on another stage: begin stages with layers {starts} by training.megatron_args.{PIPELINE_LAYOUT}"
                )


def _even_chunks(num_layers: int, layout: LayoutConfig, first: int | None, last: int | None) -> list[int]:
    """Return the number of layers of each chunk, in forward order.

    `first`, `last`: layers of the first and last stage; None: an even share.
    """
    virtual = layout.virtual_pipeline or 1
    given = {stage: count for stage, count in ((0, first), (layout.pipeline - 1, last)) if count is not None}
    rest = num_layers - sum(given.values())
    middle = layout.pipeline - len(given)
    if (middle and rest % middle) or (not middle and rest):
        fields = [name for name, count in ((FIRST_STAGE_LAYERS, first), (LAST_STAGE_LAYERS, last)) if count]
        raise UserError(
            f"{rest} layers do not divide over the {middle} pipeline stages between the first and the last: change "
            f"{' and '.join(f'training.megatron_args.{name}' for name in fields)}"
        )
    per_stage = [given.get(stage, rest // middle if middle else 0) for stage in range(layout.pipeline)]
    return [count // virtual for _ in range(virtual) for count in per_stage]


def _parse_pipeline_layout(value: Any) -> list[int]:
    """Count the layers of each chunk in Megatron's notation: a list of lists of names, or `Et*3|(tt|)*29L`."""
    if isinstance(value, str):
        value = value.replace(",", "")
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            value = re.sub(pattern, lambda match: match[1] * int(match[2]), value)
        return [chunk.count("t") for chunk in value.split("|")]
    return [chunk.count("decoder") for chunk in value]
