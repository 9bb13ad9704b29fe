"""Which layers stand on which pipeline stage, from the settings alone."""

import re
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from grpo_mp.config import Layout
from grpo_mp.errors import UserError

FIRST, LAST, FREE = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
Stages = tuple[tuple[int, ...], ...]  # layers of every stage, over all its chunks


def stage_layers(layers: int, layout: Layout, megatron: Mapping[str, Any]) -> Stages:
    """Layers of each stage; raises UserError where Megatron's fields place more or fewer than there are."""
    if megatron.get(FREE):
        chunks = _written(megatron[FREE])
    else:
        chunks = _counted(layers, layout, megatron.get(FIRST), megatron.get(LAST))
    if len(chunks) % layout.pipeline or sum(chunks) != layers or min(chunks) < 0:
        raise UserError(
            f"optimizer.megatron places {sum(chunks)} layers on {len(chunks)} stages {chunks}, the model has {layers} "
            f"and layout.pipeline={layout.pipeline}: let them agree"
        )
    bounds = list(pairwise(accumulate(chunks, initial=0)))
    return tuple(
        tuple(layer for start, end in bounds[stage :: layout.pipeline] for layer in range(start, end))
        for stage in range(layout.pipeline)
    )


def _counted(layers: int, layout: Layout, first: int | None, last: int | None) -> list[int]:
    """Layers of each chunk, in the order that tokens take."""
    virtual = layout.virtual_pipeline or 1
    fixed = {place: count for place, count in ((0, first), (layout.pipeline - 1, last)) if count is not None}
    rest, middle = layers - sum(fixed.values()), layout.pipeline - len(fixed)
    if (middle and rest % middle) or (not middle and rest):
        raise UserError(
            f"{rest} layers do not divide over the {middle} pipeline stages between the first and the last: change "
            f"{' and '.join(f'optimizer.megatron.{name}' for name, set_ in ((FIRST, first), (LAST, last)) if set_)}"
        )
    whole = [fixed.get(stage, rest // middle if middle else 0) for stage in range(layout.pipeline)]
    return [count // virtual for _ in range(virtual) for count in whole]


def _written(text: Any) -> list[int]:
    """Megatron's own notation: a list of lists of words, or `Et*3|(tt|)*29L`."""
    if isinstance(text, str):
        text = text.replace(",", "")
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        return [stage.count("t") for stage in text.split("|")]
    return [list(stage).count("decoder") for stage in text]
