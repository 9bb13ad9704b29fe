"""Parameter mapping: the relation of each Megatron parameter to Hugging Face tensors, as data.

A family lists `Rule`s; `expand` turns them into one `Param` per Megatron parameter of the full model. Loading, export
and weight sync use the same rules.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class Section(NamedTuple):
    """Rows [start, stop) of each of `parts` equal parts of the Hugging Face tensor with index `tensor`."""

    tensor: int
    start: int
    stop: int
    parts: int = 1


class Run(NamedTuple):
    """Consecutive rows of a Megatron shard that are also consecutive in the shard of one Hugging Face tensor."""

    tensor: int
    row: int  # the first of the rows in the Hugging Face shard
    rows: int


@dataclass(frozen=True)
class Rule:
    """One rule of a family's mapping. `expand` replaces `{layer}` and `{expert}` in its names.

    The rows of a Megatron parameter stand in groups; a group has its share of the rows of each section, in the order of
    `sections`. Tensor parallelism divides whole groups. Example: query, key and value form one group for each KV head.
    """

    name: str  # Megatron name
    hf: tuple[str, ...]  # Hugging Face names
    shapes: tuple[Shape, ...]  # full shapes of the Hugging Face tensors
    tp_dim: int | None = None  # dimension divided by tensor parallelism; None: replicated
    sections: tuple[Section, ...] = ()  # (): each Hugging Face tensor is one section
    groups: int = 0  # 0: one group for each tensor-parallel rank
    layers: Sequence[int] | None = None
    experts: int = 0
    vocabulary: bool = False  # dimension 0 is padded to a multiple of the tensor-parallel size
    keep_float32: bool = False  # not cast to model.dtype (the router's expert bias)
    load_group: str = ""  # parameters of a layer with equal load_group are sent to engines in one request
    alias: bool = False  # second Megatron copy of tensors of another rule: loaded, but not sent or saved
    adapts: bool = True  # can have adapters, if it is a projection in a layer

    @property
    def applies_to_no_layer(self) -> bool:
        return self.layers is not None and not self.layers

    def example(self) -> "Param":
        single = replace(self, layers=self.layers and self.layers[:1], experts=min(self.experts, 1))
        (param,) = expand([single]).values()
        return param


@dataclass(frozen=True)
class Param(Rule):
    """A Megatron parameter or buffer of the full model: a rule with layer and expert filled in."""

    layer: int | None = None
    expert: int | None = None

    @property
    def is_projection(self) -> bool:
        """Return whether the parameter is a matrix that can have adapters or be quantized to FP8.

        These are all matrices except embedding, output layer, routers, gates of shared experts, weights of an indexer's
        heads, and the input projection of a multi-token-prediction layer.
        """
        others = ("router.weight", "eh_proj.weight", "shared_experts.gate_weight", "indexer.linear_weights_proj.weight")
        return len(self.shapes[0]) == 2 and not self.vocabulary and not self.name.endswith(others)

    @property
    def takes_adapters(self) -> bool:
        """Return whether the parameter can have adapters."""
        return self.is_projection and self.layer is not None and self.adapts

    @property
    def in_fp8(self) -> tuple[bool, ...]:
        """Return for each Hugging Face tensor whether FP8 releases quantize it.

        They quantize projections except the gates b and a of gated delta nets, which are smaller than a block.
        """
        unquantized = ("in_proj_ba.weight", "in_proj_b.weight", "in_proj_a.weight")
        return tuple(self.is_projection and not name.endswith(unquantized) for name in self.hf)

    @property
    def num_elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def shard_shape(self, shape: Shape, tp_size: int) -> Shape:
        """Return the shape of a Hugging Face tensor's shard on one tensor-parallel rank.

        Raises ValueError if `tp_size` does not divide the tensor.
        """
        if self.tp_dim is None:
            return shape
        size = shape[self.tp_dim]
        if size % tp_size and not self.vocabulary:
            raise ValueError(f"{self.name}: axis {self.tp_dim} of {shape} does not divide over {tp_size} ranks")
        return (*shape[: self.tp_dim], -(-size // tp_size), *shape[self.tp_dim + 1 :])

    def local_shape(self, tp_size: int) -> Shape:
        shards = [self.shard_shape(shape, tp_size) for shape in self.shapes]
        return (sum(shape[0] for shape in shards), *shards[0][1:])


def expand(rules: Iterable[Rule]) -> dict[str, Param]:
    """Expand rules to one `Param` per Megatron name. Raises ValueError if two rules make one name."""
    params: dict[str, Param] = {}
    for rule in rules:
        for layer in rule.layers if rule.layers is not None else (None,):
            for expert in range(rule.experts) if rule.experts else (None,):
                name, *hf = (text.format(layer=layer, expert=expert) for text in (rule.name, *rule.hf))
                if name in params:
                    raise ValueError(f"two rules make {name}")
                params[name] = Param(**vars(rule) | {"name": name, "hf": tuple(hf)}, layer=layer, expert=expert)
    return params


def shard_runs(param: Param, tp_size: int) -> list[Run]:
    """Return the rows of a Megatron shard in order, as runs of rows of its Hugging Face shards.

    The Hugging Face shard of a rank is the concatenation of its `shard_ranges`.
    """
    tp = tp_size if param.tp_dim == 0 else 1
    if not param.sections and not param.groups:
        return [Run(index, 0, param.shard_shape(shape, tp)[0]) for index, shape in enumerate(param.shapes)]
    sections = param.sections or [Section(index, 0, shape[0]) for index, shape in enumerate(param.shapes)]
    groups = max(1, param.groups // tp)
    runs = []
    for group in range(groups):
        for tensor, start, stop, parts in sections:
            if parts == 1:
                count = (stop - start) // tp // groups
                runs.append(Run(tensor, start // tp + group * count, count))
                continue
            rows = param.shapes[tensor][0] // parts
            in_group = parts // tp // groups
            first = group * in_group
            runs += [Run(tensor, part * rows + start, stop - start) for part in range(first, first + in_group)]
    return runs


def shard_ranges(param: Param, index: int, tp_size: int, tp_rank: int) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) along `param.tp_dim` of a rank's shard of Hugging Face tensor `index`.

    Sections of a tensor that follow each other are divided one by one.
    """
    assert param.tp_dim is not None
    size = param.shapes[index][param.tp_dim]
    whole = [(section.start, section.stop) for section in param.sections if section[::3] == (index, 1)]
    ranges = []
    for start, stop in whole or [(0, size)]:
        count = -(-(stop - start) // tp_size)
        ranges.append((min(start + tp_rank * count, stop), min(start + (tp_rank + 1) * count, stop)))
    return ranges


def fuse(param: Param, shards: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Fuse the Hugging Face shards of one tensor-parallel rank into its Megatron shard."""
    import torch  # imported here because torch is slow, and validating settings imports this module

    if len(shards) == 1 and not param.sections:
        return shards[0]
    runs = shard_runs(param, _tp_size(param, sum(shard.shape[0] for shard in shards)))
    return torch.cat([shards[tensor].narrow(0, row, count) for tensor, row, count in runs])


def unfuse(param: Param, shard: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """Split a Megatron shard into the shards of its Hugging Face tensors, the inverse of `fuse`."""
    import torch

    if len(param.hf) == 1 and not param.sections:
        return (shard,)
    runs = shard_runs(param, _tp_size(param, shard.shape[0]))
    parts: list[list[tuple[int, torch.Tensor]]] = [[] for _ in param.hf]
    for run, part in zip(runs, shard.split([run.rows for run in runs]), strict=True):
        parts[run.tensor].append((run.row, part))
    in_order = [[part for _, part in sorted(pairs, key=lambda pair: pair[0])] for pairs in parts]
    return tuple(pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in in_order)


def _tp_size(param: Param, rows: int) -> int:
    return sum(shape[0] for shape in param.shapes) // rows


def join(param: Param, shards: "Sequence[Sequence[torch.Tensor]]") -> "tuple[torch.Tensor, ...]":
    """Concatenate unfused shards, given by tensor-parallel rank, to full Hugging Face tensors without padding."""
    import torch

    tensors = []
    for index, shape in enumerate(param.shapes):
        by_rank = [rank_shards[index] for rank_shards in shards]
        if param.tp_dim is None or len(by_rank) == 1:
            tensor = by_rank[0]
        else:
            sizes = [stop - start for start, stop in shard_ranges(param, index, len(by_rank), 0)]
            sections = zip(*(part.split(sizes) for part in by_rank), strict=True) if len(sizes) > 1 else [by_rank]
            tensor = torch.cat([part for section in sections for part in section], dim=param.tp_dim)
        tensors.append(tensor[: shape[0]] if param.vocabulary else tensor)
    return tuple(tensors)
