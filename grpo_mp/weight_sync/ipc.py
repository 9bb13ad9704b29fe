"""Transport over CUDA IPC: the engine maps a bucket in the memory of its own GPU.

Every rank of the engine holds the full bucket as one flat tensor; the engine's host rank sends the IPC handles of all
ranks in one request.
"""

import torch
import torch.distributed as dist

from grpo_mp.weight_sync.shared_memory import NamedTensors
from grpo_mp.weight_sync.transport import WeightClient


class IpcTransport:
    """Sends buckets from every rank of an engine; only the host rank has a client.

    Each bucket is a new allocation. Torch keeps shared memory until the reader releases it, so the engine may
    still copy after its response. The allocator must not use expandable segments: they have no IPC handle.
    """

    def __init__(self, client: WeightClient | None, engine_group: dist.ProcessGroup) -> None:
        """Take the gloo group of the engine's ranks, its host rank first."""
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # identify devices by UUID: the engine numbers them differently
        self._client, self._group = client, engine_group
        self._host_rank = dist.get_global_rank(engine_group, 0)

    async def begin(self) -> None:
        if self._client:
            await self._client.begin_weight_update()

    async def send(self, bucket: NamedTensors) -> None:
        payloads = [""] * dist.get_world_size(self._group) if self._client else None
        dist.gather_object(_ipc_handle(bucket), payloads, dst=self._host_rank, group=self._group)
        if self._client and payloads:
            await self._client.update_weights_from_tensor(payloads, load_format="flattened_bucket")
        dist.barrier(group=self._group)
        torch.cuda.ipc_collect()  # otherwise torch frees the bucket only when the next one is shared

    async def end(self, version: int) -> None:
        if self._client:
            await self._client.end_weight_update(version)
        dist.barrier(group=self._group)


def _ipc_handle(bucket: NamedTensors) -> str:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    # The engine views slices of the bytes as each dtype: widest first keeps every slice aligned.
    bucket = sorted(bucket, key=lambda item: -item[1].element_size())
    flat = FlattenedTensorBucket(named_tensors=bucket)
    torch.cuda.current_stream().synchronize()  # the reader does not wait for this rank's stream
    payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    handle: str = MultiprocessingSerializer.serialize(payload, output_str=True)
    return handle
