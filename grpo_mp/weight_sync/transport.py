"""How a bucket of Hugging Face tensors gets from an engine's host rank into the engine."""

import base64
import pickle
from typing import Protocol

from grpo_mp import platform
from grpo_mp.config import Sync
from grpo_mp.weight_sync.reshard import Named
from grpo_mp.weight_sync.shared_memory import LOADER, export_tensors


class WeightClient(Protocol):
    """The calls of an engine's client that take weights in."""

    async def begin_weight_update(self) -> None: ...

    async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None: ...

    async def end_weight_update(self, version: int) -> None: ...


class Transport(Protocol):
    """One sync: `begin`, `send` for each bucket, `end`."""

    async def begin(self) -> None: ...

    async def send(self, bucket: Named) -> None: ...

    async def end(self, version: int) -> None: ...


class HostTransport:
    """Through memory that the engine on this machine maps; a request only says where the tensors lie in it.

    Every tensor-parallel rank of the engine sees the whole tensors and takes its slice. The engine unpickles
    what its own job sends over loopback under the run's secret, and nothing else.
    """

    def __init__(self, client: WeightClient, engine_ranks: int) -> None:
        self._client, self._engine_ranks = client, engine_ranks

    async def begin(self) -> None:
        await self._client.begin_weight_update()

    async def send(self, bucket: Named) -> None:
        with export_tensors(bucket) as note:
            payload = base64.b64encode(pickle.dumps([("note", note)])).decode()
            await self._client.update_weights_from_tensor([payload] * self._engine_ranks, load_format=LOADER)

    async def end(self, version: int) -> None:
        await self._client.end_weight_update(version)


def over_ipc(wanted: Sync) -> bool:
    """Whether buckets stay on the device; otherwise they go through host memory."""
    return wanted.transport == "ipc" or (wanted.transport == "auto" and platform.on_cuda())


def bucket_bytes(bucket: Named) -> int:
    """Bytes of the tensors of one bucket."""
    return sum(tensor.nbytes for _, tensor in bucket)
