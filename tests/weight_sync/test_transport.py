"""Buckets sent by HostTransport, loaded as the engine's processes load them."""

import asyncio
import base64
import pickle
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from grpo_mp.rollout.shared_memory import LOADER, export_tensors, load_bucket, open_tensors
from grpo_mp.weight_sync.transport import HostTransport

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


class RecordingClient:
    """A client whose engine stores the tensors that each of its ranks receives."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.received: list[dict[str, Tensor]] = []
        self.payload_bytes = 0

    async def begin_weight_update(self) -> None:
        self.calls.append("begin")

    async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None:
        self.calls.append(f"update by {load_format}")
        self.payload_bytes = sum(map(len, payloads))
        self.received = [self._load(payload) for payload in payloads]

    async def end_weight_update(self, version: int) -> None:
        self.calls.append(f"end {version}")

    @staticmethod
    def _load(payload: str) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}

        def load_weights(named: Iterable[tuple[str, Tensor]]) -> None:
            weights.update(named)

        load_bucket(SimpleNamespace(load_weights=load_weights), pickle.loads(base64.b64decode(payload)))
        return weights


def send_bucket(bucket: list[tuple[str, Tensor]], engine_ranks: int = 1) -> RecordingClient:
    async def update_weights() -> RecordingClient:
        client = RecordingClient()
        transport = HostTransport(client, engine_ranks)
        await transport.begin()
        await transport.send(bucket)
        await transport.end(7)
        return client

    return asyncio.run(update_weights())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_engine_rank_receives_the_bucket(dtype: torch.dtype) -> None:
    bucket = [
        ("a.weight", torch.randn(3, 5).mul(9).to(dtype)),
        ("b.weight", torch.randn(4, 3).mul(9).to(dtype).t()),
        ("c.scale", torch.tensor(2.5)),
        ("d.bias", torch.randn(7)),
    ]
    client = send_bucket(bucket, engine_ranks=3)
    assert client.calls == ["begin", f"update by {LOADER}", "end 7"]
    assert len(client.received) == 3
    for received in client.received:
        assert list(received) == [name for name, _ in bucket]
        for name, expected in bucket:
            assert received[name].dtype == expected.dtype
            assert torch.equal(received[name].double(), expected.double())


def test_slice_is_sent_without_its_full_storage() -> None:
    matrix = torch.randn(1000, 64)
    client = send_bucket([("rows", matrix[10:12]), ("columns", matrix[:2, 3:5])])
    assert client.payload_bytes < 2000
    (received,) = client.received
    assert torch.equal(received["rows"], matrix[10:12])
    assert torch.equal(received["columns"], matrix[:2, 3:5])
    assert received["rows"].untyped_storage().nbytes() < 1000


def test_opened_tensors_outlive_the_export_and_are_private() -> None:
    tensor = torch.arange(5.0)
    with export_tensors([("a", tensor)]) as metadata:
        (_, kept), *_ = open_tensors(metadata)
        (_, changed), *_ = open_tensors(metadata)
        changed.zero_()
    tensor.fill_(9.0)
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert changed.tolist() == [0.0] * 5


def test_loader_name_is_importable() -> None:
    module, _, name = LOADER.rpartition(".")
    assert (load_bucket.__module__, load_bucket.__name__) == (module, name)
