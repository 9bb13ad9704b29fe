"""Parameters per rank in closed form from the family's mapping and the layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from grpo_mp.config.sections import LayoutConfig, LoraConfig
from grpo_mp.distributed.stages import StageLayers
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapters_of
from grpo_mp.models.mapping import Rule
from grpo_mp.models.multi_token_prediction import COPIED_EMBEDDING
from grpo_mp.models.sparse_attention import INDEXER
from grpo_mp.models.value_head import critic_config, critic_rules


def with_mtp_layer(stage_layers: StageLayers, hf: HfConfig) -> StageLayers:
    """Append the trained multi-token-prediction layer, if any, to the last stage; its number is `num_hidden_layers`."""
    *before, last = stage_layers
    return (*before, (*last, *range(hf.int("num_hidden_layers"), hf.policy_layers)))


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
        is_buffer = rule.keep_float32 and INDEXER not in rule.name  # norms of indexers are float32 parameters
        if is_buffer or rule.applies_to_no_layer:
            continue
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
