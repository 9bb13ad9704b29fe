"""Transports that bring a bucket of Hugging Face tensors from an engine's host rank into the engine."""

import base64
import io
import pickle
from typing import Any, Protocol

import torch

from grpo_mp import platform
from grpo_mp.config.sections import SyncConfig
from grpo_mp.weight_sync.shared_memory import LOADER, NamedTensors, export_tensors


class WeightClient(Protocol):
    """The weight-update calls of an engine's client."""

    async def begin_weight_update(self) -> None: ...

    async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None: ...

    async def end_weight_update(self, version: int) -> None: ...


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

    def __init__(self, client: WeightClient, engine_ranks: int) -> None:
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


def uses_cuda_ipc(settings: SyncConfig) -> bool:
    """Tell whether buckets go by CUDA IPC; otherwise through shared host memory."""
    return settings.transport == "ipc" or (settings.transport == "auto" and platform.on_cuda())
