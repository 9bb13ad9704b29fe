"""Transports that bring a bucket of Hugging Face tensors from an engine's host rank into the engine."""

import base64
import io
import pickle
from typing import Any, Protocol

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.config.sections import SyncConfig
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.shared_memory import LOADER, NamedTensors, export_tensors


class Transport(Protocol):
    """Sends one sync: `begin`, `send` for each bucket, `end`."""

    async def begin(self) -> None: ...

    async def send(self, bucket: NamedTensors) -> None: ...

    async def end(self, version: int) -> None: ...


class HostTransport:
    """Sends buckets through shared host memory that the engine maps; requests carry metadata only.

    Every tensor-parallel rank of the engine maps the full tensors and loads its slice. The engine unpickles only
    what its own job sends over loopback, authenticated by the run's secret.
    """

    def __init__(self, client: EngineClient, engine_ranks: int) -> None:
        self._client, self._engine_ranks = client, engine_ranks

    async def begin(self) -> None:
        await self._client.begin_weight_update()

    async def send(self, bucket: NamedTensors) -> None:
        with export_tensors(bucket) as metadata:
            file = io.BytesIO()
            _Pickler(file).dump([("metadata", metadata)])
            payload = base64.b64encode(file.getvalue()).decode()
            await self._client.update_weights_from_tensor([payload] * self._engine_ranks, load_format=LOADER)

    async def end(self, version: int) -> None:
        await self._client.end_weight_update(version)


class _Pickler(pickle.Pickler):
    """Writes uint8 tensors as lists: Megatron-Core 0.19 gives torch's storages a loader that SGLang refuses to call."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.ByteTensor, (value.tolist(),)) if isinstance(value, torch.Tensor) else NotImplemented


class IpcTransport:
    """Sends buckets by CUDA IPC from every rank of an engine, which maps them in the memory of its own GPU.

    Every rank holds the full bucket as one flat tensor; the host rank, which alone has a client, sends the IPC handles
    of all ranks in one request.

    Each bucket is a new allocation. Torch keeps shared memory until the reader releases it, so the engine may
    still copy after its response. The allocator must not use expandable segments: they have no IPC handle.
    """

    def __init__(self, client: EngineClient | None, engine_group: dist.ProcessGroup) -> None:
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


def uses_cuda_ipc(settings: SyncConfig) -> bool:
    """Tell whether buckets go by CUDA IPC; otherwise through shared host memory."""
    return settings.transport == "ipc" or (settings.transport == "auto" and platform.on_cuda())
