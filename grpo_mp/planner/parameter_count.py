"""Layers of pipeline stages, and parameters per rank in closed form from the family's mapping and the layout."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from grpo_mp.config.sections import LayoutConfig, LoraConfig
from grpo_mp.distributed.layout import (
    FIRST_STAGE_LAYERS,
    LAST_STAGE_LAYERS,
    PIPELINE_LAYOUT,
    IndexerShape,
    check_stages,
)
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapters_of
from grpo_mp.models.mapping import Rule
from grpo_mp.models.multi_token_prediction import COPIED_EMBEDDING
from grpo_mp.models.value_head import critic_config, critic_rules
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


def check_index_share(stage_layers: StageLayers, indexer: IndexerShape) -> None:
    """Raise UserError if a stage begins with a layer without an indexer: Megatron sends no choice of keys to it."""
    for stage, layers in enumerate(stage_layers):
        for layer in set(layers) - indexer.layers:
            if layer - 1 not in layers:
                raise UserError(
                    f"pipeline stage {stage} begins with layer {layer}, which has no indexer and needs the keys chosen "
                    f"on another stage: begin stages with layers {', '.join(map(str, sorted(indexer.layers)))} by "
                    f"training.megatron_args.{PIPELINE_LAYOUT}"
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


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters on one rank: `expert` in routed experts, `dense` everywhere else."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.dense + other.dense, self.expert + other.expert)

    def times(self, number: int) -> "ParameterCount":
        return ParameterCount(self.dense * number, self.expert * number)


ZERO = ParameterCount(0, 0)


def local_parameter_counts(
    hf: HfConfig, layout: LayoutConfig, stage_layers: StageLayers, rules: Sequence[Rule] | None = None
) -> tuple[ParameterCount, ...]:
    """Return the number of parameters on one rank of each pipeline stage.

    The parallel sizes must divide the model's dimensions. `rules`: mapping rules to count; None: those of the policy.
    """
    counts = [ZERO] * len(stage_layers)
    last = len(stage_layers) - 1
    for rule in rules or family_of(hf).rules(hf):
        if rule.keep_float32 or rule.applies_to_no_layer:
            continue  # buffers are no parameters
        count = rule_parameters(rule, layout.tensor, layout.expert, layout.expert_tensor)
        if rule.layers is not None:
            for stage, layers in enumerate(stage_layers):
                counts[stage] += count.times(len(set(layers).intersection(rule.layers)))
        elif rule.name.startswith("embedding"):
            # A tied output layer counts only where the embedding is on another stage.
            counts[0] += count.times(int(last > 0 or not hf.tied))
        elif rule.name != COPIED_EMBEDDING or last:  # the last of several stages has a copy of the embedding
            counts[last] += count
    return tuple(counts)


def critic_parameter_counts(
    hf: HfConfig, layout: LayoutConfig, stage_layers: StageLayers
) -> tuple[ParameterCount, ...]:
    """Return the critic's parameters on one rank of each stage. `hf`, `stage_layers`: of the policy."""
    critic = critic_config(hf)
    layers = hf.int("num_hidden_layers")
    decoder = tuple(tuple(layer for layer in of_stage if layer < layers) for of_stage in stage_layers)
    return local_parameter_counts(critic, layout, decoder, critic_rules(critic))


def adapter_counts(
    hf: HfConfig, layout: LayoutConfig, stage_layers: StageLayers, lora: LoraConfig
) -> tuple[ParameterCount, ...]:
    """Return the LoRA parameters on one rank of each pipeline stage."""
    counts = [ZERO] * len(stage_layers)
    for rule in family_of(hf).rules(hf):
        if rule.applies_to_no_layer or rule.layers is None:
            continue
        tensor = layout.expert_tensor if rule.experts else layout.tensor
        adapters = adapters_of(rule.example(), lora.rank, lora.targets)
        size = sum(prod(one.local_shape(tensor)) for adapter in adapters for one in (adapter.a, adapter.b))
        count = _count(rule, size, layout.expert)
        for stage, layers in enumerate(stage_layers):
            counts[stage] += count.times(len(set(layers).intersection(rule.layers)))
    return tuple(counts)


def rule_parameters(rule: Rule, tensor: int, expert: int, expert_tensor: int) -> ParameterCount:
    """Count the parameters of a mapping rule on one rank, in one layer."""
    return _count(rule, prod(rule.example().local_shape(expert_tensor if rule.experts else tensor)), expert)


def _count(rule: Rule, size: int, expert: int) -> ParameterCount:
    return ParameterCount(0, size * rule.experts // expert) if rule.experts else ParameterCount(size, 0)
