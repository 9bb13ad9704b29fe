"""Weight sync: send all buckets of the policy to every engine as a new version."""

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.models.mapping import Param
from grpo_mp.weight_sync.plan import Bucket, plan_sync
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import Transport

RunCoroutine = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(frozen=True)
class SyncReport:
    """Sizes and duration of one sync. `nbytes` and `largest_bucket`: bytes that this rank sent to its engine."""

    version: int
    nbytes: int
    buckets: int
    largest_bucket: int
    seconds: float


def make_plan(
    params: Mapping[str, Param],
    local_shards: Mapping[str, int],
    targets: tuple[int, ...],
    bucket_bytes: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> tuple[Bucket, ...]:
    """Return the plan, the same on all ranks; every rank must call this. `local_shards`: name -> part on this rank."""
    owned = {name: param for name, param in params.items() if not param.alias}
    itemsize = {name: 4 if param.keep_float32 else dtype.itemsize for name, param in owned.items()}
    return plan_sync(owned, all_gather(dict(local_shards), group), targets, bucket_bytes, itemsize)


@dataclass(frozen=True)
class WeightSync:
    """Sends the policy's weights to the engines."""

    resharder: Resharder
    transport: Transport | None  # None on ranks that host no engine
    run: RunCoroutine  # runs a coroutine of the transport to completion

    def update_weights(self, version: int) -> SyncReport:
        """Send all weights as `version`. Every rank must call this. Raises UserError where an engine refuses."""
        started, nbytes, largest = time.monotonic(), 0, 0
        if self.transport:
            self.run(self.transport.begin())
        for bucket in self.resharder.buckets():
            if self.transport:
                self.run(self.transport.send(bucket))
            size = sum(tensor.nbytes for _, tensor in bucket)
            nbytes, largest = nbytes + size, max(largest, size)
            bucket.clear()  # free its memory before the next one is received
        if self.transport:
            self.run(self.transport.end(version))
        return SyncReport(version, nbytes, len(self.resharder.plan), largest, time.monotonic() - started)
