"""Weight sync: send all buckets of the policy to every engine as a new version."""

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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
    parts: list[dict[str, int]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(parts, dict(local_shards), group=group)
    itemsize = {name: 4 if param.keep_float32 else dtype.itemsize for name, param in owned.items()}
    return plan_sync(owned, parts, targets, bucket_bytes, itemsize)


class WeightSync:
    """Sends the policy's weights to the engines. `transport` is None on ranks that host no engine."""

    def __init__(self, resharder: Resharder, transport: Transport | None, run: RunCoroutine) -> None:
        """Take the plan's executor, the engine's transport, and what runs a coroutine of it to completion."""
        self._resharder, self._transport, self._run = resharder, transport, run

    @property
    def fp8(self) -> bool:
        """Tell whether engines get projections in blockwise FP8."""
        return self._resharder.fp8

    def update_weights(self, version: int) -> SyncReport:
        """Send all weights as `version`. Every rank must call this. Raises UserError where an engine refuses."""
        started, nbytes, largest = time.monotonic(), 0, 0
        if self._transport:
            self._run(self._transport.begin())
        for bucket in self._resharder.buckets():
            if self._transport:
                self._run(self._transport.send(bucket))
            size = sum(tensor.nbytes for _, tensor in bucket)
            nbytes, largest = nbytes + size, max(largest, size)
            bucket.clear()  # free its memory before the next one is received
        if self._transport:
            self._run(self._transport.end(version))
        return SyncReport(version, nbytes, len(self._resharder.plan), largest, time.monotonic() - started)
