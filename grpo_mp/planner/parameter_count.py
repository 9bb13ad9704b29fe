"""Parameters of each rank by multiplication: the family's mapping, divided by the layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from grpo_mp.config import Layout
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Rule, expand
from grpo_mp.planner.stages import Stages


@dataclass(frozen=True)
class Count:
    """Parameters that one rank holds: those every expert-parallel rank has, and those of its routed experts."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: "Count") -> "Count":
        return Count(self.dense + other.dense, self.expert + other.expert)


NOTHING = Count(0, 0)


@dataclass(frozen=True)
class Table:
    """Parameters of one rank by place: each layer, the embedding, and the ends (final norm and output layer)."""

    layers: Mapping[int, Count]
    embedding: Count
    final: Count
    tied: bool

    def stage(self, layers: Sequence[int], first: bool, last: bool) -> Count:
        """One pipeline stage. A tied output layer is a parameter of its own only where the embedding is elsewhere."""
        total = sum((self.layers[layer] for layer in layers), NOTHING)
        if first:
            total += self.embedding
        if last:
            total += self.final
        return total if not (last and self.tied and first) else replace(total, dense=total.dense - self.embedding.dense)


def make_table(hf: HfConfig, tensor: int, expert: int, expert_tensor: int) -> Table:
    """The table for these parallel sizes; they must divide the model's."""
    layers: dict[int, Count] = {}
    embedding = final = NOTHING
    for rule in family_of(hf).rules(hf):
        if rule.keep_float32 or rule.layers == ():
            continue  # a buffer, or nothing
        count = rule_count(rule, tensor, expert, expert_tensor)
        if rule.layers is not None:
            layers |= {layer: layers.get(layer, NOTHING) + count for layer in rule.layers}
        elif rule.name.startswith("embedding"):
            embedding += count
        else:
            final += count
    return Table(layers, embedding, final, hf.tied)


def local_parameter_counts(hf: HfConfig, layout: Layout, stages: Stages) -> tuple[Count, ...]:
    """What one rank of each pipeline stage holds; all ranks of a stage hold equally many."""
    table = make_table(hf, layout.tensor, layout.expert, layout.expert_tensor)
    last = len(stages) - 1
    return tuple(table.stage(layers, stage == 0, stage == last) for stage, layers in enumerate(stages))


def rule_count(rule: Rule, tensor: int, expert: int, expert_tensor: int) -> Count:
    """One layer's worth of a rule on one of so many ranks."""
    single = replace(rule, layers=rule.layers and rule.layers[:1], experts=min(rule.experts, 1))
    (param,) = expand([single]).values()
    size = prod(param.local_shape(expert_tensor if rule.experts else tensor))
    return Count(0, size * rule.experts // expert) if rule.experts else Count(size, 0)
