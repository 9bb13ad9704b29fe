"""The parameter mapping: how each Megatron parameter relates to Hugging Face tensors, as data.

A family states `Rule`s once; `expand` turns them into one `Param` per Megatron parameter of the whole model.
Loading, export and weight sync read the same statement. Nothing here touches files, ranks or Megatron.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Fuse = Literal["none", "gate_up", "qkv"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One line of a family's mapping. `{layer}` and `{expert}` in the names are filled in by `expand`."""

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]  # of the Hugging Face tensors
    fuse: Fuse = "none"
    split: int | None = None  # axis that tensor parallelism divides; None: every rank holds it whole
    layers: tuple[int, ...] | None = None
    experts: int = 0
    head_dim: int = 0  # for qkv
    vocabulary: bool = False  # axis 0 is padded until tensor parallelism divides it
    keep_float32: bool = False  # must not be cast (the router's expert bias)
    alias: bool = False  # a second Megatron copy of tensors that another rule owns: loaded, never sent or saved


@dataclass(frozen=True)
class Param:
    """One Megatron parameter (or buffer) of the whole model, and the Hugging Face tensors it is made of."""

    name: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    fuse: Fuse
    split: int | None
    layer: int | None
    expert: int | None
    experts: int
    head_dim: int
    vocabulary: bool
    keep_float32: bool
    alias: bool

    def shard_shapes(self, parts: int) -> tuple[Shape, ...]:
        """Shape that one of `parts` tensor-parallel ranks holds of each Hugging Face tensor."""
        return tuple(_divide(self, shape, parts) for shape in self.shapes)

    @property
    def is_projection(self) -> bool:
        """Whether FP8 releases quantise it: matrices but for the embedding, the output layer and the router."""
        return len(self.shapes[0]) == 2 and not self.vocabulary and not self.name.endswith("router.weight")

    def local_shape(self, parts: int) -> Shape:
        """Shape of the Megatron parameter on one of `parts` tensor-parallel ranks."""
        shards = self.shard_shapes(parts)
        if self.fuse == "none":
            return shards[0]
        return (sum(shape[0] for shape in shards), *shards[0][1:])


def expand(rules: Iterable[Rule]) -> dict[str, Param]:
    """One `Param` per Megatron name; raises ValueError where two rules make the same name."""
    params: dict[str, Param] = {}
    for rule in rules:
        for layer in rule.layers if rule.layers is not None else (None,):
            for expert in range(rule.experts) if rule.experts else (None,):
                param = _fill(rule, layer, expert)
                if param.name in params:
                    raise ValueError(f"two rules make {param.name}")
                params[param.name] = param
    return params


def fuse(param: Param, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Hugging Face shards of one tensor-parallel rank -> the Megatron shard.

    qkv: rows are ordered by query group, [queries of the group, its key, its value], so that
    tensor parallelism divides groups; gate_up: gate rows, then up rows.
    """
    if param.fuse == "none":
        return parts[0]
    if param.fuse == "gate_up":
        return torch.cat(list(parts))
    groups = parts[1].shape[0] // param.head_dim
    by_group = [part.view(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def unfuse(param: Param, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inverse of `fuse`: a Megatron shard -> the shards of its Hugging Face tensors."""
    if param.fuse == "none":
        return (shard,)
    if param.fuse == "gate_up":
        gate, up = shard.chunk(2)
        return (gate, up)
    queries, keys, _ = (shape[0] for shape in param.shapes)
    per_group = queries // keys * param.head_dim
    groups = shard.shape[0] // (per_group + 2 * param.head_dim)
    by_group = shard.view(groups, -1, *shard.shape[1:])
    pieces = by_group.split([per_group, param.head_dim, param.head_dim], dim=1)
    return tuple(piece.flatten(0, 1) for piece in pieces)


def join(param: Param, shards: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Unfused shards of all tensor-parallel ranks (outer) -> whole Hugging Face tensors, padding cut off."""
    wholes = []
    for index, shape in enumerate(param.shapes):
        pieces = [shard[index] for shard in shards]
        whole = pieces[0] if param.split is None or len(pieces) == 1 else torch.cat(pieces, dim=param.split)
        wholes.append(whole[: shape[0]] if param.vocabulary else whole)
    return tuple(wholes)


def shard_range(param: Param, shape: Shape, parts: int, part: int) -> tuple[int, int]:
    """Which rows (along `param.split`) of a Hugging Face tensor tensor-parallel rank `part` holds."""
    assert param.split is not None
    size = _divide(param, shape, parts)[param.split]
    start = part * size
    return min(start, shape[param.split]), min(start + size, shape[param.split])


def _divide(param: Param, shape: Shape, parts: int) -> Shape:
    if param.split is None:
        return shape
    size = shape[param.split]
    if size % parts and not param.vocabulary:
        raise ValueError(f"{param.name}: axis {param.split} of {shape} does not divide over {parts} ranks")
    return (*shape[: param.split], -(-size // parts), *shape[param.split + 1 :])


def _fill(rule: Rule, layer: int | None, expert: int | None) -> Param:
    return Param(
        name=rule.megatron.format(layer=layer, expert=expert),
        hf=tuple(name.format(layer=layer, expert=expert) for name in rule.hf),
        shapes=rule.shapes,
        fuse=rule.fuse,
        split=rule.split,
        layer=layer,
        expert=expert,
        experts=rule.experts,
        head_dim=rule.head_dim,
        vocabulary=rule.vocabulary,
        keep_float32=rule.keep_float32,
        alias=rule.alias,
    )
