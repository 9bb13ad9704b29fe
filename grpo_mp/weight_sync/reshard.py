"""Run a sync plan: shards travel between ranks, whole Hugging Face tensors come out on the target ranks."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from grpo_mp.models.fp8 import SCALE, quantise_at_once
from grpo_mp.models.mapping import Param, join, unfuse
from grpo_mp.weight_sync.plan import Bucket, LocalShard, SyncPlan

Named = list[tuple[str, torch.Tensor]]


def all_gather_shards(mine: Mapping[str, int], group: dist.ProcessGroup) -> list[LocalShard]:
    """What every rank holds, known to all; `mine`: parameter name -> part on this rank."""
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(mine), group=group)
    return [LocalShard(name, part, rank) for rank, held in enumerate(everyone) for name, part in held.items()]


class Resharder:
    """Carries this rank's part in a plan out, bucket after bucket."""

    def __init__(
        self,
        plan: SyncPlan,
        params: Mapping[str, Param],
        tensors: Mapping[str, torch.Tensor],
        tp_sizes: Mapping[str, int],
        is_target: bool,
        fp8: bool = False,
    ) -> None:
        """`tensors`: this rank's shards by whole-model name; `tp_sizes`: how many parts each parameter has.

        `fp8`: the targets take projections in blockwise FP8.
        """
        self.plan, self.params, self.tensors, self.tp_sizes = plan, params, tensors, tp_sizes
        self.is_target, self.fp8 = is_target, fp8
        self.rank = dist.get_rank()

    def buckets(self) -> Iterator[Named]:
        """Hugging Face tensors of each bucket in turn; empty lists on ranks that are no target.

        Every rank must run the iterator to its end. A bucket's tensors may be freed once the next is asked for.
        """
        for bucket in self.plan.buckets:
            shards = self._exchange(bucket)
            yield self._assemble(bucket, shards) if self.is_target else []

    def _exchange(self, bucket: Bucket) -> dict[tuple[str, int], torch.Tensor]:
        shards: dict[tuple[str, int], torch.Tensor] = {}
        moves: list[dist.P2POp] = []
        for transfer in bucket.transfers:
            key = (transfer.name, transfer.part)
            if transfer.source == transfer.target == self.rank:
                shards[key] = self.tensors[transfer.name].detach()
            elif transfer.source == self.rank:
                shard = self.tensors[transfer.name].detach().contiguous()
                moves.append(dist.P2POp(dist.isend, shard, transfer.target))
            elif transfer.target == self.rank:
                shards[key] = self._empty_shard(transfer.name)
                moves.append(dist.P2POp(dist.irecv, shards[key], transfer.source))
        for move in dist.batch_isend_irecv(moves) if moves else ():
            move.wait()
        return shards

    def _empty_shard(self, name: str) -> torch.Tensor:
        like = next(iter(self.tensors.values()))
        dtype = torch.float32 if self.params[name].keep_float32 else like.dtype
        return torch.empty(self.params[name].local_shape(self.tp_sizes[name]), dtype=dtype, device=like.device)

    def _assemble(self, bucket: Bucket, shards: dict[tuple[str, int], torch.Tensor]) -> Named:
        named: Named = []
        for name in bucket.names:
            param = self.params[name]
            parts = range(self.tp_sizes[name] if param.tp_dim is not None else 1)
            wholes = join(param, [unfuse(param, shards.pop((name, part))) for part in parts])
            for hf, whole in zip(param.hf, wholes, strict=True):
                named += _in_fp8(hf, whole) if self.fp8 and param.is_projection else [(hf, whole.contiguous())]
        return named


def _in_fp8(name: str, whole: torch.Tensor) -> Named:
    weight, scale = quantise_at_once(whole)
    return [(name, weight), (name + SCALE, scale)]
