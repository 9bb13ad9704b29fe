"""CUDA IPC: the engine maps a bucket that lies on the same device, so no byte leaves the GPU.

Every rank of the engine holds the whole bucket as one flat tensor on its own device; the engine's host sends
the handles of all of them in one request.
"""

import torch
import torch.distributed as dist

from grpo_mp.weight_sync.reshard import Named
from grpo_mp.weight_sync.transport import WeightClient


class IpcTransport:
    """Runs on every rank of an engine; only the host has a client.

    A bucket is a fresh allocation each time. Torch keeps shared memory until the reader lets it go, so the
    engine may still copy after it has answered. The allocator must not use expandable segments: their memory
    has no IPC handle.
    """

    def __init__(self, client: WeightClient | None, engine_group: dist.ProcessGroup) -> None:
        """`engine_group`: host-memory group of the engine's ranks, its host first."""
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # names devices by UUID: the engine numbers its devices on its own
        self._client, self._group = client, engine_group
        self._host = dist.get_global_rank(engine_group, 0)

    async def begin(self) -> None:
        if self._client:
            await self._client.begin_weight_update()

    async def send(self, bucket: Named) -> None:
        payloads: list[str] | None = None
        if self._client:
            payloads = [""] * dist.get_world_size(self._group)
        dist.gather_object(_handle(bucket), payloads, dst=self._host, group=self._group)
        if self._client and payloads:
            await self._client.update_weights_from_tensor(payloads, load_format="flattened_bucket")
        dist.barrier(group=self._group)
        torch.cuda.ipc_collect()  # torch would keep the bucket until another one is shared

    async def end(self, version: int) -> None:
        if self._client:
            await self._client.end_weight_update(version)
        dist.barrier(group=self._group)


def _handle(bucket: Named) -> str:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    # The engine views the bytes as each dtype again: with the widest first, each begins at a multiple of its size.
    bucket = sorted(bucket, key=lambda item: -item[1].element_size())
    flat = FlattenedTensorBucket(named_tensors=bucket)
    torch.cuda.current_stream().synchronize()  # the reader does not wait for this rank's stream
    shared = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    text: str = MultiprocessingSerializer.serialize(shared, output_str=True)
    return text
