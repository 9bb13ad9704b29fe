"""Exports and payloads of a sync, loaded as the engine's processes load them."""

import asyncio
import base64
import os
import pickle
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import make_groups, single_rank_environment, start_parallel, stop_parallel
from grpo_mp.models.mapping import Rule, expand
from grpo_mp.rollout.shared_memory import (
    LOADER,
    Export,
    NamedTensors,
    TensorSpec,
    as_tensor,
    export_to_host,
    load_weights,
    packed_bytes,
    select,
)
from grpo_mp.utils.errors import EngineError, PhaseTimeout
from grpo_mp.weight_sync.plan import Piece, RankRound
from grpo_mp.weight_sync.transport import EngineLink, HostTransport, serialize
from grpo_mp.weight_sync.wire import WireFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
PARAMS = expand([Rule("a", ("x.weight", "y.weight"), ((3, 5), (4, 5))), Rule("b", ("z.weight",), ((7,),))])
WIRE = WireFormat(PARAMS, {"a": 1, "b": 1}, torch.float32)
PIECES = (Piece("a"), Piece("b"))
ROUND = RankRound({}, {}, (), PIECES, {}, {0: PIECES})

NOTHING = RankRound({}, {}, (), (), {}, {})


class RecordingClient:
    """A client whose engine stores the tensors that each of its ranks loads."""

    index = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded: list[dict[str, Tensor]] = []

    async def pause_generation(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def continue_generation(self) -> None:
        self.calls.append("continue")

    async def begin_weight_update(self, with_draft: bool = False) -> None:
        self.calls.append("begin with the draft" if with_draft else "begin")

    async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None:
        self.calls.append(f"update by {load_format}")
        self.loaded += [load(payload) for payload in payloads]

    async def end_weight_update(self, version: int, keep_cache: bool = False) -> None:
        self.calls.append(f"end {version}")


def rollout_of(client: RecordingClient) -> Any:
    """An engine that may not be lost."""
    return SimpleNamespace(client=client, call=asyncio.run, losing_engine=lambda: nullcontext(client))


def specs_of(tensors: NamedTensors) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


def export_all(tensors: NamedTensors) -> AbstractContextManager[Export]:
    return export_to_host(tensors, specs_of(tensors))


def load(payload: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}

    def load_into(named: Iterable[tuple[str, Tensor]]) -> None:
        weights.update(named)

    model = SimpleNamespace(load_weights=load_into, modules=list, named_modules=dict)
    load_weights(model, pickle.loads(base64.b64decode(payload)))
    return weights


def test_export_closes_its_file_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    bucket = [("a", torch.ones(3)), ("empty", torch.empty(0, 4))]
    with pytest.raises(ZeroDivisionError), export_all(bucket):
        raise ZeroDivisionError
    assert os.listdir("/proc/self/fd") == before


class OneLayer(torch.nn.Module):
    """A weight, and the scales of an FP8 cache that SGLang makes as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.attention = torch.nn.Module()
        for name in ("k_scale", "v_scale"):
            setattr(self.attention, name, torch.nn.Parameter(torch.tensor(torch.nan), requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


def test_a_sync_sets_the_scales_of_an_fp8_cache_to_one() -> None:
    """Memory that an engine gave back when it slept is undefined when it wakes."""
    model = OneLayer()
    bucket = [("weight", torch.arange(3.0))]
    with export_all(list(bucket)) as export:
        load_weights(model, [("", as_tensor([export]))])
    assert model.weight.tolist() == [0, 1, 2]
    assert (model.attention.k_scale.item(), model.attention.v_scale.item()) == (1, 1)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with single_rank_environment():
        start_parallel(LayoutConfig(), 0, 60.0)
        group = make_groups([[0]], 60.0)
        assert group
        yield group
        stop_parallel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_payload_is_loaded_as_it_was_exported(dtype: torch.dtype) -> None:
    tensors = [
        ("a.weight", torch.randn(3, 5).mul(9).to(dtype)),
        ("b.weight", torch.randn(4, 3).mul(9).to(dtype).t()),
        ("c.scale", torch.tensor(2.5)),
        ("d.bias", torch.randn(7)),
        ("empty", torch.empty(0, 4)),
    ]
    with export_to_host(list(tensors), specs_of(tensors)) as export, export_all([("e", torch.ones(2))]) as other:
        loaded = load(serialize([export, select(other, {"e"}), select(export, set())]))
    assert list(loaded) == [name for name, _ in tensors] + ["e"]
    for name, tensor in tensors:
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].double(), tensor.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "index"), [(2, 0), (2, 1), (8, 5)])
def test_a_slice_has_the_place_that_it_has_in_the_full_tensor(dtype: torch.dtype, count: int, index: int) -> None:
    """A loader that narrows the full tensor, as SGLang's does, finds it; the memory holds little else."""
    full = {"w1": torch.randn(48, 80).mul(9).to(dtype), "w2": torch.randn(80, 48).mul(9).to(dtype)}
    size = 48 // count
    tensors = []
    specs = []
    for dim, (name, tensor) in enumerate(full.items()):
        part = tensor.narrow(dim, index * size, size)
        tensors.append((name, part))
        specs.append(TensorSpec(name, dtype, tuple(part.shape), (dim, index, count)))
    with export_to_host(tensors, specs) as export:
        loaded = load(serialize([export]))
    for dim, (name, tensor) in enumerate(full.items()):
        assert loaded[name].shape == tensor.shape
        narrowed = [each.narrow(dim, index * size, size).contiguous() for each in (loaded[name], tensor)]
        assert torch.equal(*(each.view(torch.uint8) for each in narrowed))
    margins = [sum(sizes) for sizes in zip(*(spec.margins for spec in specs), strict=True)]
    assert export["nbytes"] <= packed_bytes(specs) + sum(margins) + 128


def staged() -> NamedTensors:
    return [(spec.name, torch.randn(spec.shape)) for spec in WIRE.all_specs(PIECES)]


def test_the_engine_loads_while_the_body_runs(group: dist.ProcessGroup) -> None:
    """One rank is the engine, its node and the job; more are in tests/parallel."""
    body_ran = threading.Event()

    class WaitingClient(RecordingClient):
        async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None:
            assert body_ran.wait(60.0), "the body waits for the engine"
            await super().update_weights_from_tensor(payloads, load_format)

    client = WaitingClient()
    tensors = staged()
    link = EngineLink(rollout_of(client), HostTransport(WIRE, group, 0), group, group)
    link.begin()
    with link.loading(ROUND, list(tensors)):
        assert not client.loaded
        body_ran.set()
    with pytest.raises(ZeroDivisionError), link.loading(NOTHING, []):
        raise ZeroDivisionError
    link.end(7)
    assert client.calls == ["begin", f"update by {LOADER}", f"update by {LOADER}", "end 7"]
    assert client.loaded[0].keys() == dict(tensors).keys()
    assert all(torch.equal(client.loaded[0][name], tensor) for name, tensor in tensors)


def test_an_engine_that_dies_before_it_pauses_is_lost_and_not_the_run(group: dist.ProcessGroup) -> None:
    class DyingClient(RecordingClient):
        async def pause_generation(self, mode: str) -> None:
            raise EngineError("engine 0: the connection failed")

    client = DyingClient()
    lost = list[str]()

    @contextmanager
    def losing_engine() -> Iterator[Any]:
        try:
            yield client
        except EngineError as error:
            lost.append(str(error))

    rollout = rollout_of(client)
    rollout.losing_engine = losing_engine
    link = EngineLink(rollout, HostTransport(WIRE, group, 0), group, group, pause="retract")
    link.begin()
    assert (lost, client.calls) == (["engine 0: the connection failed"], [])


def test_an_engine_that_does_not_answer_ends_the_sync(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_mp.weight_sync.transport.LOAD_TIMEOUT_S", 0.1)

    may_answer = threading.Event()

    class SilentClient(RecordingClient):
        index = 3

        async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None:
            await asyncio.to_thread(may_answer.wait)

    link = EngineLink(rollout_of(SilentClient()), HostTransport(WIRE, group, 0), group, group)
    message = r"engine 3: weights were not loaded within 0.1 s"
    try:
        with pytest.raises(PhaseTimeout, match=message), link.loading(ROUND, staged()):
            pass
    finally:
        may_answer.set()  # the interpreter waits for its thread


@pytest.mark.parametrize("with_draft", [False, True])
def test_an_update_is_of_the_draft_too_where_it_is_trained(group: dist.ProcessGroup, with_draft: bool) -> None:
    client = RecordingClient()
    link = EngineLink(rollout_of(client), HostTransport(WIRE, group, 0), group, group, with_draft=with_draft)
    link.begin()
    assert client.calls == ["begin with the draft" if with_draft else "begin"]
