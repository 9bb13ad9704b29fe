"""Parameter mapping: the relation of each Megatron parameter to Hugging Face tensors, as data.

A family lists `Rule`s; `expand` turns them into one `Param` per Megatron parameter of the full model. Loading, export
and weight sync use the same rules.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import torch

Fuse = Literal["none", "gate_up", "qkv"]
Shape = tuple[int, ...]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Rule:
    """One rule of a family's mapping. `expand` replaces `{layer}` and `{expert}` in its names."""

    name: str  # Megatron name
    hf: tuple[str, ...]  # Hugging Face names
    shapes: tuple[Shape, ...]  # full shapes of the Hugging Face tensors
    fuse: Fuse = "none"
    tp_dim: int | None = None  # dimension divided by tensor parallelism; None: replicated
    layers: Sequence[int] | None = None
    experts: int = 0
    head_dim: int = 0  # with fuse=qkv
    vocabulary: bool = False  # dimension 0 is padded to a multiple of the tensor-parallel size
    keep_float32: bool = False  # not cast to model.dtype (the router's expert bias)
    load_group: str = ""  # parameters of a layer with equal load_group are sent to engines in one request
    alias: bool = False  # second Megatron copy of tensors of another rule: loaded, but not sent or saved

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
        """Return whether FP8 releases quantize the parameter.

        They quantize all matrices except embedding, output layer, routers, and the input projection of a
        multi-token-prediction layer.
        """
        unquantized = ("router.weight", "eh_proj.weight")
        return len(self.shapes[0]) == 2 and not self.vocabulary and not self.name.endswith(unquantized)

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


def fuse(param: Param, shards: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Fuse the Hugging Face shards of one tensor-parallel rank into its Megatron shard.

    gate_up: gate rows, then up rows. qkv: rows are ordered by query group, [queries of the group, its key, its value],
    so that tensor parallelism divides whole groups.
    """
    import torch  # imported here because torch is slow, and validating settings imports this module

    if param.fuse == "none":
        return shards[0]
    if param.fuse == "gate_up":
        return torch.cat(list(shards))
    groups = shards[1].shape[0] // param.head_dim
    by_group = [shard.view(groups, -1, *shard.shape[1:]) for shard in shards]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def unfuse(param: Param, shard: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """Split a Megatron shard into the shards of its Hugging Face tensors, the inverse of `fuse`."""
    if param.fuse == "none":
        return (shard,)
    if param.fuse == "gate_up":
        gate, up = shard.chunk(2)
        return (gate, up)
    queries, keys, _ = (shape[0] for shape in param.shapes)
    per_group = queries // keys * param.head_dim
    groups = shard.shape[0] // (per_group + 2 * param.head_dim)
    by_group = shard.view(groups, -1, *shard.shape[1:])
    qkv = by_group.split([per_group, param.head_dim, param.head_dim], dim=1)
    return tuple(tensor.flatten(0, 1) for tensor in qkv)


def join(param: Param, shards: "Sequence[Sequence[torch.Tensor]]") -> "tuple[torch.Tensor, ...]":
    """Concatenate unfused shards, given by tensor-parallel rank, to full Hugging Face tensors without padding."""
    import torch

    tensors = []
    for index, shape in enumerate(param.shapes):
        by_rank = [rank_shards[index] for rank_shards in shards]
        tensor = by_rank[0] if param.tp_dim is None or len(by_rank) == 1 else torch.cat(by_rank, dim=param.tp_dim)
        tensors.append(tensor[: shape[0]] if param.vocabulary else tensor)
    return tuple(tensors)


def split_by_bytes(sizes: Mapping[Name, int], max_bytes: int) -> list[tuple[tuple[Name, ...], int]]:
    """Split names, in order, into groups of at most `max_bytes`, or of a single larger name.

    Return the names and the total bytes of each group.
    """
    groups: list[list[Name]] = []
    totals: list[int] = []
    for name, size in sizes.items():
        if not groups or totals[-1] + size > max_bytes:
            groups.append([])
            totals.append(0)
        groups[-1].append(name)
        totals[-1] += size
    return list(zip(map(tuple, groups), totals, strict=True))


def shard_range(param: Param, shape: Shape, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the range [start, stop) along `param.tp_dim` of a rank's shard of a Hugging Face tensor."""
    assert param.tp_dim is not None
    size = param.shard_shape(shape, tp_size)[param.tp_dim]
    start = tp_rank * size
    return min(start, shape[param.tp_dim]), min(start + size, shape[param.tp_dim])
