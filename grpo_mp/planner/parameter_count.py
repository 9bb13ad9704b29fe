"""Parameters per rank in closed form, from the model family's parameter mapping and the layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from grpo_mp.config.sections import LayoutConfig, LoraConfig
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapters_of
from grpo_mp.models.mapping import Rule
from grpo_mp.models.multi_token_prediction import COPIED_EMBEDDING
from grpo_mp.models.value_head import critic_config, critic_rules
from grpo_mp.planner.pipeline_layout import StageLayers


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


ZERO = ParameterCount(0, 0)


@dataclass(frozen=True)
class ParameterTable:
    """Number of parameters on one rank, by layer and outside the layers.

    `output`: final norm and output layer. A trained multi-token-prediction layer follows the last decoder layer.
    """

    layers: Mapping[int, ParameterCount]
    embedding: ParameterCount
    output: ParameterCount
    copied_embedding: ParameterCount  # of a multi-token-prediction layer, on the last of several stages


def parameter_table(
    hf: HfConfig, tensor: int, expert: int, expert_tensor: int, rules: Sequence[Rule] | None = None
) -> ParameterTable:
    """Count the parameters per rank for these parallel sizes, which must divide the model's dimensions.

    `rules`: mapping rules to count; None: those of the policy.
    """
    layers: dict[int, ParameterCount] = {}
    embedding = output = copied = ZERO
    for rule in rules or family_of(hf).rules(hf):
        if rule.keep_float32 or rule.applies_to_no_layer:
            continue  # buffers are no parameters
        count = rule_parameters(rule, tensor, expert, expert_tensor)
        if rule.layers is not None:
            layers |= {layer: layers.get(layer, ZERO) + count for layer in rule.layers}
        elif rule.name.startswith("embedding"):
            embedding += count
        elif rule.name == COPIED_EMBEDDING:
            copied += count
        else:
            output += count
    return ParameterTable(layers, embedding, output, copied)


def local_parameter_counts(
    hf: HfConfig, layout: LayoutConfig, stage_layers: StageLayers, rules: Sequence[Rule] | None = None
) -> tuple[ParameterCount, ...]:
    """Return the number of parameters on one rank of each pipeline stage.

    `rules`: mapping rules to count; None: those of the policy.
    """
    table = parameter_table(hf, layout.tensor, layout.expert, layout.expert_tensor, rules)
    counts = [sum((table.layers[layer] for layer in layers), ZERO) for layers in stage_layers]
    if not (hf.tied and len(counts) == 1):  # a tied output layer counts only where the embedding is on another stage
        counts[0] += table.embedding
    counts[-1] += table.output + (table.copied_embedding if len(counts) > 1 else ZERO)
    return tuple(counts)


def critic_parameter_counts(
    hf: HfConfig, layout: LayoutConfig, stage_layers: StageLayers
) -> tuple[ParameterCount, ...]:
    """Return the critic's parameters on one rank of each stage. `hf`, `stage_layers`: of the policy."""
    critic, layers = critic_config(hf), hf.int("num_hidden_layers")
    decoder = tuple(tuple(layer for layer in of_stage if layer < layers) for of_stage in stage_layers)
    return local_parameter_counts(critic, layout, decoder, critic_rules(critic))


def adapter_counts(
    hf: HfConfig, layout: LayoutConfig, stage_layers: StageLayers, lora: LoraConfig
) -> tuple[ParameterCount, ...]:
    """Return the LoRA parameters on one rank of each pipeline stage."""
    by_layer: dict[int, ParameterCount] = {}
    for rule in family_of(hf).rules(hf):
        if rule.applies_to_no_layer:
            continue
        count = ZERO
        for adapter in adapters_of(rule.example(), lora.rank, lora.targets):
            for one in (adapter.a, adapter.b):
                size = prod(one.local_shape(layout.expert_tensor if rule.experts else layout.tensor))
                count += (
                    ParameterCount(0, size * rule.experts // layout.expert) if rule.experts else ParameterCount(size, 0)
                )
        by_layer |= {layer: by_layer.get(layer, ZERO) + count for layer in rule.layers or ()}
    return tuple(sum((by_layer[layer] for layer in layers), ZERO) for layers in stage_layers)


def largest_adapted(hf: HfConfig, layout: LayoutConfig, targets: tuple[str, ...] | None = None) -> int:
    """Return the elements on one rank of the largest weight matrix that adapters of `targets` change.

    `targets`: module names or suffixes of them; None: all projections.
    """
    return max(
        prod(rule.example().local_shape(layout.expert_tensor if rule.experts else layout.tensor))
        for rule in family_of(hf).rules(hf)
        if not rule.applies_to_no_layer and adapters_of(rule.example(), 1, targets)
    )


def rule_parameters(rule: Rule, tensor: int, expert: int, expert_tensor: int) -> ParameterCount:
    """Count the parameters of a mapping rule on one rank, in one layer."""
    size = prod(rule.example().local_shape(expert_tensor if rule.experts else tensor))
    return ParameterCount(0, size * rule.experts // expert) if rule.experts else ParameterCount(size, 0)
