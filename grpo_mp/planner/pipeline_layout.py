"""Assignment of layers to pipeline stages, from the settings and Megatron's fields."""

import re
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.layout import FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS, PIPELINE_LAYOUT, check_stages
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError, read_number

StageLayers = tuple[tuple[int, ...], ...]  # [stage]: the stage's layers, over all its virtual chunks


def layers_of_stages(num_layers: int, layout: LayoutConfig, megatron: Mapping[str, Any]) -> StageLayers:
    """Return the layers of each pipeline stage.

    Megatron's fields must place exactly `num_layers` layers.
    """
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


def with_mtp_layer(stage_layers: StageLayers, hf: HfConfig) -> StageLayers:
    """Append the trained multi-token-prediction layer, if any, to the last stage; its number is `num_hidden_layers`."""
    *before, last = stage_layers
    return (*before, (*last, *range(hf.int("num_hidden_layers"), hf.policy_layers)))


def _even_chunks(num_layers: int, layout: LayoutConfig, first: int | None, last: int | None) -> list[int]:
    """Return the number of layers of each chunk, in forward order.

    `first`, `last`: layers of the first and last stage; None: an even share.
    """
    virtual = layout.virtual_pipeline or 1
    given = {stage: count for stage, count in ((0, first), (layout.pipeline - 1, last)) if count is not None}
    rest, middle = num_layers - sum(given.values()), layout.pipeline - len(given)
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
    if not isinstance(value, list) or not all(isinstance(chunk, list) for chunk in value):
        raise UserError(
            f"training.megatron_args.{PIPELINE_LAYOUT}: expected text like Et*3|t*3L, or a list of lists of names, "
            f"found {value!r}"
        )
    return [chunk.count("decoder") for chunk in value]
