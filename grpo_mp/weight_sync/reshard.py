"""Resharding: executes one rank's part of a sync plan, from the policy's shards to full Hugging Face tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp import platform
from grpo_mp.rollout.shared_memory import NamedTensors, TensorSpec, packed_bytes, unpack
from grpo_mp.weight_sync.plan import RankRound, Shard
from grpo_mp.weight_sync.wire import WireFormat


@dataclass(frozen=True)
class Resharder:
    """Executes the rounds of one rank.

    `tensors`: the rank's shards by full-model name; `group`: process group of the plan's ranks.
    """

    rounds: Sequence[RankRound]
    wire: WireFormat
    tensors: Mapping[str, Tensor]
    group: dist.ProcessGroup | None = None

    def stages(self, rounds: Sequence[RankRound]) -> Iterator[NamedTensors]:
        """Exchange the shards of each round; yield the full tensors that this rank stages in each round.

        While a round is sent, the messages of the next round are packed. Every rank must exhaust the iterator.
        """
        packed = self.messages(rounds[0]) if rounds else {}
        for round_, following in zip_longest(rounds, rounds[1:]):
            arriving, requests = self._exchange(round_, packed)
            packed = self.messages(following) if following else {}
            for request in requests:
                request.wait()
            requests.clear()  # frees the sent messages
            yield self.join(round_, arriving)

    def messages(self, round_: RankRound) -> dict[int, Tensor]:
        """Return the packed messages of a round by target rank, uint8 [bytes]."""
        messages: dict[int, Tensor] = {}
        copies: dict[Shard, list[list[Tensor]]] = {}  # views in the messages that each shard is copied to
        for target, shards in round_.sends.items():
            specs = self._specs(shards)
            messages[target] = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=platform.device())
            views = unpack(messages[target], specs)
            for shard in shards:
                copies.setdefault(shard, []).append([next(views) for _ in self.wire.shard_specs(shard)])
        for shard, places in copies.items():  # quantize each shard only once for all targets
            tensors = self._local(shard)
            for place in places:
                for view, tensor in zip(place, tensors, strict=True):
                    view.copy_(tensor)
        return messages

    def join(self, round_: RankRound, arrived: Mapping[int, Tensor]) -> NamedTensors:
        """Join this rank's own shards and the received messages; return the staged tensors. `arrived`: by source."""
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

    def _exchange(self, round_: RankRound, messages: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], list[dist.Work]]:
        """Start sending `messages` (by target); return the receive buffers by source, and the pending operations."""
        arriving = {
            source: torch.empty(packed_bytes(self._specs(shards)), dtype=torch.uint8, device=platform.device())
            for source, shards in round_.receives.items()
        }
        sends = [dist.P2POp(dist.isend, sent, None, self.group, group_peer=to) for to, sent in messages.items()]
        receives = [dist.P2POp(dist.irecv, taken, None, self.group, group_peer=of) for of, taken in arriving.items()]
        return arriving, dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []

    def sent_bytes(self, round_: RankRound) -> int:
        return sum(packed_bytes(self._specs(shards)) for shards in round_.sends.values())

    def _local(self, shard: Shard) -> list[Tensor]:
        return self.wire.shard_tensors(shard, self.tensors[shard.name].detach())

    def _specs(self, shards: Sequence[Shard]) -> list[TensorSpec]:
        return [spec for shard in shards for spec in self.wire.shard_specs(shard)]
