"""Wire format of the weight sync: names, dtypes and shapes of the tensors that are sent.

For engines in a low precision (`models/weight_formats.py`) a shard that consists of whole blocks is quantized before it
is sent, which halves the bytes in FP8; values and scales are bitwise equal to those of the full tensor. A shard that
cuts a block is sent in the model's dtype, and the receiver quantizes the joined tensor. Slices of experts always
consist of whole blocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from grpo_mp.models.mapping import Param, Shape, join, shard_ranges, unfuse
from grpo_mp.models.weight_formats import WeightFormat
from grpo_mp.rollout.shared_memory import NamedTensors, TensorSpec, packed_bytes
from grpo_mp.utils.errors import UserError
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY, WHOLE, ParamGroup, Piece, Shard, ShardSizes, Slice, group_params

BUCKET_BYTES = 2**30  # default memory of a rank for weights in transit


@dataclass(frozen=True)
class WireFormat:
    """Format in which parameters are sent and loaded.

    `tp_sizes`: tensor-parallel size of each parameter; `format`: of projections that engines load in a low precision.
    """

    params: Mapping[str, Param]
    tp_sizes: Mapping[str, int]
    dtype: torch.dtype
    format: WeightFormat | None = None

    @cached_property
    def sizes(self) -> ShardSizes:
        """Return functions that compute the size of a sent shard and of a staged piece."""
        sent = cache(lambda shard: packed_bytes(self.shard_specs(shard)))
        # All slices have the same size, so one cached value for each number of slices is enough.
        staged = cache(lambda name, total: packed_bytes(self.specs(Piece(name, Slice(0, total)))))
        return ShardSizes(sent, lambda piece: staged(piece.name, piece.slice.total))

    def round_bytes(self, bucket_bytes: int | None) -> int:
        """Return the size limit of a round [bytes].

        `bucket_bytes`: memory of a rank for weights in transit; None: 1 GiB, or more if the largest group needs it.
        """
        names, largest = self.largest_group
        least = ROUNDS_IN_MEMORY * largest
        if bucket_bytes is not None and bucket_bytes < least:
            raise UserError(
                f"sync.bucket_bytes={bucket_bytes}: a quarter of it is a round of the weight sync, and "
                f"{' with '.join(names)}, which an engine loads at once, has {largest:,} bytes: set {least} or more, "
                "or leave it out"
            )
        return (bucket_bytes or max(BUCKET_BYTES, least)) // ROUNDS_IN_MEMORY

    @cached_property
    def largest_group(self) -> tuple[tuple[str, ...], int]:
        """Return the names of the largest group of parameters that an engine loads at once, and its size [bytes]."""
        by_names = {group.names: self._largest_bytes(group) for group in group_params(self.params)}
        largest = max(by_names, key=by_names.__getitem__)
        return largest, by_names[largest]

    def _largest_bytes(self, group: ParamGroup) -> int:
        shards = [Shard(name, part) for name in group.names for part in range(self.parts(name))]
        return max(sum(map(self.sizes.sent, shards)), sum(self.sizes.staged(Piece(name)) for name in group.names))

    def parts(self, name: str) -> int:
        return self.tp_sizes[name] if self.params[name].tp_dim is not None else 1

    def specs(self, piece: Piece) -> list[TensorSpec]:
        """Return the specs of the Hugging Face tensors of a piece, as the engine loads them."""
        param = self.params[piece.name]
        (number, total) = piece.slice
        dim = param.tp_dim
        shapes = [shape if dim is None else _cut(shape, dim, shape[dim] // total) for shape in param.shapes]
        specs = self._specs(param, shapes, self.quantized(param))
        if piece.slice != WHOLE and dim is not None:
            specs = [replace(spec, sliced=(dim, number, total)) for spec in specs]
        return specs + [TensorSpec(name, torch.int64, (len(shape),)) for name, shape in self._full_shapes(param)]

    def all_specs(self, pieces: Iterable[Piece]) -> list[TensorSpec]:
        """Return the concatenated `specs` of several pieces."""
        return [spec for piece in pieces for spec in self.specs(piece)]

    def shard_specs(self, shard: Shard) -> list[TensorSpec]:
        """Return the specs of the tensors in which a shard is sent."""
        param = self.params[shard.name]
        shapes = [
            shape if param.tp_dim is None else _cut(shape, param.tp_dim, kept[1])
            for shape, kept in zip(param.shapes, self._kept(shard), strict=True)
        ]
        quantized = self.quantized(param) if self.quantizes_shards(shard.name) else (False,) * len(param.hf)
        return self._specs(param, shapes, quantized)

    def quantized(self, param: Param) -> tuple[bool, ...]:
        """Return for each Hugging Face tensor of a parameter whether engines load it in the format."""
        return self.format.quantized(param) if self.format else (False,) * len(param.hf)

    def quantizes_shards(self, name: str) -> bool:
        """Return whether a parameter's shards are quantized before they are sent."""
        return any(self.quantized(self.params[name])) and self.is_whole_blocks(name)

    def is_whole_blocks(self, name: str) -> bool:
        """Return whether each tensor-parallel part of a parameter is one range, and of whole blocks if quantized."""
        param = self.params[name]
        count = self.parts(name)
        if count == 1 or param.tp_dim is None or not self.format:
            return True
        block = self.format.block[param.tp_dim]
        ranges = [(shard_ranges(param, index, count, 0), here) for index, here in enumerate(self.quantized(param))]
        return all(len(held) == 1 and (held[0][1] % block == 0 or not here) for held, here in ranges)

    def shard_tensors(self, shard: Shard, tensor: Tensor) -> list[Tensor]:
        """Convert a Megatron shard to the tensors that `shard_specs` describes. `tensor`: this rank's part."""
        param = self.params[shard.name]
        quantizes = self.quantizes_shards(shard.name)
        pieces: list[Tensor] = []
        parts = zip(unfuse(param, tensor), self._kept(shard), self.quantized(param), strict=True)
        for piece, (first, count), here in parts:
            if param.tp_dim is not None:
                piece = piece.narrow(param.tp_dim, first, count)
            pieces += self.format.quantize(piece) if self.format and quantizes and here else [piece]
        return pieces

    def join(self, piece: Piece, shards: Sequence[Sequence[Tensor]]) -> NamedTensors:
        """Join the shards of a piece to the tensors that `specs` describes. `shards`: tensors of each part."""
        param = self.params[piece.name]
        shapes = self._full_shapes(param)
        names = [spec.name for spec in self.specs(piece)]
        joined: list[Tensor] = []
        if self.quantizes_shards(piece.name):
            for tensors in zip(*shards, strict=True):
                joined.append(tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=param.tp_dim or 0))
        else:
            for tensor, here in zip(join(param, shards), self.quantized(param), strict=True):
                joined += self.format.quantize(tensor) if self.format and here else [tensor.contiguous()]
        return list(zip(names, [*joined, *(torch.tensor(shape) for _, shape in shapes)], strict=True))

    def _full_shapes(self, param: Param) -> list[tuple[str, Shape]]:
        """Return the tensors with the shapes of full weights, as (name, shape), if the format has such tensors."""
        if not self.format or not self.format.shape_suffix:
            return []
        weights = zip(param.hf, param.shapes, self.quantized(param), strict=True)
        return [(name + self.format.shape_suffix, shape) for name, shape, here in weights if here]

    def _kept(self, shard: Shard) -> list[tuple[int, int]]:
        """Return what is sent of a shard's Hugging Face tensors, along `tp_dim`: (first row, number of rows) of each.

        Rows outside the slice and the padding of the vocabulary are left out.
        """
        param = self.params[shard.name]
        (number, total) = shard.slice
        if param.tp_dim is None:
            return [(0, 0)] * len(param.hf)
        kept = []
        for index, shape in enumerate(param.shapes):
            held = shard_ranges(param, index, self.parts(param.name), shard.part)
            if len(held) > 1:  # only experts are sent in slices
                kept.append((0, sum(stop - start for start, stop in held)))
                continue
            size = shape[param.tp_dim] // total
            start = max(held[0][0], number * size)
            stop = min(held[0][1], (number + 1) * size)
            kept.append((start - held[0][0], stop - start))
        return kept

    def _specs(self, param: Param, shapes: Sequence[Shape], quantized: Sequence[bool]) -> list[TensorSpec]:
        dtype = torch.float32 if param.keep_float32 else self.dtype
        specs = []
        for name, shape, here in zip(param.hf, shapes, quantized, strict=True):
            if self.format and here:
                stored = self.format.stored(shape, dtype)
                specs += [TensorSpec(name + part.suffix, part.dtype, part.shape) for part in stored]
            else:
                specs.append(TensorSpec(name, dtype, shape))
        return specs


def _cut(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
