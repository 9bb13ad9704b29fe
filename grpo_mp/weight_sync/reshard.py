"""Resharding: execute a sync plan, from the policy's shards to full Hugging Face tensors on the target ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_mp.models.fp8 import SCALE, quantize_at_once
from grpo_mp.models.mapping import Param, join, unfuse
from grpo_mp.rollout.shared_memory import NamedTensors
from grpo_mp.weight_sync.plan import Bucket


@dataclass(frozen=True)
class Resharder:
    """Executes this rank's part of a plan, bucket by bucket."""

    plan: Sequence[Bucket]
    params: Mapping[str, Param]
    tensors: Mapping[str, torch.Tensor]  # this rank's shards by full-model name
    tp_sizes: Mapping[str, int]  # how many parts each parameter has
    is_target: bool
    fp8: bool = False  # the targets take projections in blockwise FP8

    def buckets(self) -> Iterator[NamedTensors]:
        """Yield the Hugging Face tensors of each bucket; an empty list on ranks that are no target.

        Every rank must exhaust the iterator. A bucket's tensors may be freed before the next one is requested.
        """
        for bucket in self.plan:
            shards = self._exchange(bucket)
            yield self._assemble(bucket, shards) if self.is_target else []

    def _exchange(self, bucket: Bucket) -> dict[tuple[str, int], torch.Tensor]:
        shards: dict[tuple[str, int], torch.Tensor] = {}
        operations: list[dist.P2POp] = []
        rank, like = dist.get_rank(), next(iter(self.tensors.values()))
        for transfer in bucket.transfers:
            key = (transfer.name, transfer.part)
            if transfer.source == transfer.target == rank:
                shards[key] = self.tensors[transfer.name].detach()
            elif transfer.source == rank:
                shard = self.tensors[transfer.name].detach().contiguous()
                operations.append(dist.P2POp(dist.isend, shard, transfer.target))
            elif transfer.target == rank:
                param = self.params[transfer.name]
                dtype = torch.float32 if param.keep_float32 else like.dtype
                shape = param.local_shape(self.tp_sizes[transfer.name])
                shards[key] = torch.empty(shape, dtype=dtype, device=like.device)
                operations.append(dist.P2POp(dist.irecv, shards[key], transfer.source))
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return shards

    def _assemble(self, bucket: Bucket, shards: dict[tuple[str, int], torch.Tensor]) -> NamedTensors:
        result: NamedTensors = []
        for name in bucket.names:
            param = self.params[name]
            parts = range(self.tp_sizes[name] if param.tp_dim is not None else 1)
            tensors = join(param, [unfuse(param, shards.pop((name, part))) for part in parts])
            for hf_name, tensor in zip(param.hf, tensors, strict=True):
                if self.fp8 and param.is_projection:
                    weight, scale = quantize_at_once(tensor)
                    result += [(hf_name, weight), (hf_name + SCALE, scale)]
                else:
                    result.append((hf_name, tensor.contiguous()))
        return result
