"""What a shard is while it travels: names, dtypes and shapes of the tensors that are sent. Pure.

Blockwise FP8 is quantized where the shard is, which halves what is sent, if the shard is whole blocks: then each block
has the factor that it has in the full tensor, bit for bit. A shard that cuts a block travels in the model's dtype, and
the receiver quantizes the joined tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from grpo_mp.models.fp8 import BLOCK, FP8, SCALE, quantize_at_once, scale_shape
from grpo_mp.models.mapping import Param, Shape, join, shard_range, unfuse
from grpo_mp.rollout.packed_tensors import NamedTensors, TensorSpec, packed_bytes
from grpo_mp.weight_sync.plan import Shard, ShardSizes


@dataclass(frozen=True)
class WireFormat:
    """How parameters travel. `tp_sizes`: parts of each parameter; `fp8`: projections arrive in blockwise FP8."""

    params: Mapping[str, Param]
    tp_sizes: Mapping[str, int]
    dtype: torch.dtype
    fp8: bool = False

    @cached_property
    def sizes(self) -> ShardSizes:
        """Return the bytes of shards and of full tensors."""
        sent = cache(lambda shard: packed_bytes(self.shard_specs(shard)))
        return ShardSizes(sent, cache(lambda name: packed_bytes(self.specs(name))))

    def parts(self, name: str) -> int:
        """Return into how many parts a parameter is divided."""
        return self.tp_sizes[name] if self.params[name].tp_dim is not None else 1

    def specs(self, name: str) -> list[TensorSpec]:
        """Describe the full Hugging Face tensors of a parameter, as the engine loads them."""
        param = self.params[name]
        return self._specs(param, param.shapes, fp8=self.fp8 and param.is_projection)

    def shard_specs(self, shard: Shard) -> list[TensorSpec]:
        """Describe the tensors of one shard, as they are sent."""
        param, count = self.params[shard.name], self.parts(shard.name)
        shapes = [_part_shape(param, shape, count, shard.part) for shape in param.shapes]
        return self._specs(param, shapes, self.quantizes_shards(shard.name))

    def quantizes_shards(self, name: str) -> bool:
        """Tell whether a parameter is quantized where its shards are: each is whole blocks."""
        param, count = self.params[name], self.parts(name)
        if not (self.fp8 and param.is_projection):
            return False
        dim = param.tp_dim
        return count == 1 or dim is None or all(shape[dim] // count % BLOCK == 0 for shape in param.shapes)

    def shard_tensors(self, shard: Shard, tensor: Tensor) -> list[Tensor]:
        """Convert a Megatron shard to the tensors that are sent: those of `shard_specs`."""
        param, specs = self.params[shard.name], self.shard_specs(shard)
        quantizes = self.quantizes_shards(shard.name)
        tensors: list[Tensor] = []
        for piece in unfuse(param, tensor):
            if quantizes:
                tensors += quantize_at_once(piece)
            else:
                tensors.append(piece[: specs[len(tensors)].shape[0]])  # without the vocabulary's padding
        return tensors

    def join(self, name: str, shards: Sequence[Sequence[Tensor]]) -> NamedTensors:
        """Join the tensors of all shards of a parameter, by part, to what `specs` describes."""
        param = self.params[name]
        if not self.quantizes_shards(name):
            named = list(zip(param.hf, join(param, shards), strict=True))
            if not (self.fp8 and param.is_projection):
                return [(hf_name, tensor.contiguous()) for hf_name, tensor in named]
            quantized = [(hf_name, quantize_at_once(tensor)) for hf_name, tensor in named]
            return [item for hf_name, (w, s) in quantized for item in ((hf_name, w), (hf_name + SCALE, s))]
        return [
            (spec.name, tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=param.tp_dim or 0))
            for spec, tensors in zip(self.specs(name), zip(*shards, strict=True), strict=True)
        ]

    def _specs(self, param: Param, shapes: Sequence[Shape], fp8: bool) -> list[TensorSpec]:
        dtype = torch.float32 if param.keep_float32 else self.dtype
        specs = []
        for name, shape in zip(param.hf, shapes, strict=True):
            if fp8:
                rows, columns = shape
                scale = TensorSpec(name + SCALE, torch.float32, scale_shape((rows, columns)))
                specs += [TensorSpec(name, FP8, shape), scale]
            else:
                specs.append(TensorSpec(name, dtype, shape))
        return specs


def _part_shape(param: Param, shape: Shape, count: int, part: int) -> Shape:
    if param.tp_dim is None or count == 1:
        return shape
    start, stop = shard_range(param, shape, count, part)
    return (*shape[: param.tp_dim], stop - start, *shape[param.tp_dim + 1 :])
