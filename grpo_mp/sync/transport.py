"""How a bucket of Hugging Face tensors gets from an engine's host rank into the engine."""

import base64
import pickle
from typing import Protocol

from grpo_mp.sync.reshard import Named


class WeightClient(Protocol):
    """The calls of an engine's client that take weights in."""

    async def begin_weight_update(self) -> None: ...

    async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None: ...

    async def end_weight_update(self, version: int) -> None: ...


class HostTransport:
    """Through host memory, in the body of a request to the engine on this machine.

    Every tensor-parallel rank of the engine gets the whole tensors and takes its slice. The engine unpickles
    what its own job sends over loopback under the run's secret, and nothing else.
    """

    def __init__(self, client: WeightClient, engine_ranks: int) -> None:
        self._client, self._engine_ranks = client, engine_ranks

    async def begin(self) -> None:
        await self._client.begin_weight_update()

    async def send(self, bucket: Named) -> None:
        # A slice would be pickled with the whole storage that it looks into: clone it.
        tensors = [(name, tensor.to("cpu", copy=True)) for name, tensor in bucket]
        payload = base64.b64encode(pickle.dumps(tensors, protocol=pickle.HIGHEST_PROTOCOL)).decode()
        await self._client.update_weights_from_tensor([payload] * self._engine_ranks)

    async def end(self, version: int) -> None:
        await self._client.end_weight_update(version)


def bucket_bytes(bucket: Named) -> int:
    """Bytes of the tensors of one bucket."""
    return sum(tensor.nbytes for _, tensor in bucket)
