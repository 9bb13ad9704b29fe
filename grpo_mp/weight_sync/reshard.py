"""Resharding: execute one rank's part of a sync plan, from the policy's shards to full Hugging Face tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp import platform
from grpo_mp.rollout.packed_tensors import NamedTensors, TensorSpec, packed_bytes, unpack
from grpo_mp.weight_sync.plan import RankRound, Shard
from grpo_mp.weight_sync.wire import WireFormat


@dataclass(frozen=True)
class Resharder:
    """Executes this rank's rounds.

    `tensors`: its shards by full-model name; `group`: of the plan's ranks, None: the default group.
    """

    rounds: Sequence[RankRound]
    wire: WireFormat
    tensors: Mapping[str, Tensor]
    group: dist.ProcessGroup | None = None

    def stage(self, round_: RankRound) -> NamedTensors:
        """Send and receive the shards of a round; return the full tensors that this rank stages.

        Every rank must call this for each round, in order.
        """
        device = platform.device()
        arriving = {
            source: torch.empty(packed_bytes(self._specs(shards)), dtype=torch.uint8, device=device)
            for source, shards in round_.receives.items()
        }
        operations = [
            *(
                dist.P2POp(dist.isend, sent, None, self.group, group_peer=to)
                for to, sent in self.messages(round_).items()
            ),
            *(dist.P2POp(dist.irecv, taken, None, self.group, group_peer=source) for source, taken in arriving.items()),
        ]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return self.join(round_, arriving)

    def messages(self, round_: RankRound) -> dict[int, Tensor]:
        """Return what this rank sends in a round, uint8, by target."""
        messages = {}
        for target, shards in round_.sends.items():
            specs, device = self._specs(shards), self.tensors[shards[0].name].device
            messages[target] = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=device)
            views = unpack(messages[target], specs)
            for shard in shards:  # one after the other: what is quantized is there once more only for one
                for tensor in self._local(shard):
                    next(views).copy_(tensor)
        return messages

    def join(self, round_: RankRound, arrived: Mapping[int, Tensor]) -> NamedTensors:
        """Return the tensors that this rank stages, from its own shards and the messages by source."""
        shards = {shard: self._local(shard) for shard in round_.own}
        for source, message in arrived.items():
            views = unpack(message, self._specs(round_.receives[source]))
            for shard in round_.receives[source]:
                shards[shard] = [next(views) for _ in self.wire.shard_specs(shard)]
        staged: NamedTensors = []
        for piece in round_.staged:
            parts = piece.slice.overlaps(self.wire.parts(piece.name))
            staged += self.wire.join(piece, [shards.pop(Shard(piece.name, part, piece.slice)) for part in parts])
        return staged

    def sent_bytes(self, round_: RankRound) -> int:
        """Return the bytes that this rank sends to others in a round."""
        return sum(packed_bytes(self._specs(shards)) for shards in round_.sends.values())

    def _local(self, shard: Shard) -> list[Tensor]:
        return self.wire.shard_tensors(shard, self.tensors[shard.name].detach())

    def _specs(self, shards: Sequence[Shard]) -> list[TensorSpec]:
        return [spec for shard in shards for spec in self.wire.shard_specs(shard)]
