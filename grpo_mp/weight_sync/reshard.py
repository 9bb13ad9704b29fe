"""Resharding: execute a sync plan, from the policy's shards to full Hugging Face tensors on the target ranks."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from grpo_mp.models.fp8 import SCALE, quantise_at_once
from grpo_mp.models.mapping import Param, join, unfuse
from grpo_mp.weight_sync.plan import Bucket
from grpo_mp.weight_sync.shared_memory import NamedTensors


class Resharder:
    """Executes this rank's part of a plan, bucket by bucket."""

    def __init__(
        self,
        plan: Sequence[Bucket],
        params: Mapping[str, Param],
        tensors: Mapping[str, torch.Tensor],
        tp_sizes: Mapping[str, int],
        is_target: bool,
        fp8: bool = False,
    ) -> None:
        """Take this rank's shards by whole-model name and the number of parts of each parameter (`tp_sizes`).

        `fp8`: the targets take projections in blockwise FP8.
        """
        self.plan, self.params, self.tensors, self.tp_sizes = plan, params, tensors, tp_sizes
        self.is_target, self.fp8 = is_target, fp8
        self.rank = dist.get_rank()

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
        like = next(iter(self.tensors.values()))
        for transfer in bucket.transfers:
            key = (transfer.name, transfer.part)
            if transfer.source == transfer.target == self.rank:
                shards[key] = self.tensors[transfer.name].detach()
            elif transfer.source == self.rank:
                shard = self.tensors[transfer.name].detach().contiguous()
                operations.append(dist.P2POp(dist.isend, shard, transfer.target))
            elif transfer.target == self.rank:
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
                    weight, scale = quantise_at_once(tensor)
                    result += [(hf_name, weight), (hf_name + SCALE, scale)]
                else:
                    result.append((hf_name, tensor.contiguous()))
        return result
