"""The order of a sync: what is sent, packed and loaded at the same time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch import Tensor

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.rollout.engine_layout import EngineParallelism
from grpo_mp.rollout.shared_memory import NamedTensors
from grpo_mp.weight_sync.plan import RankRound, Shard
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import EngineLink
from grpo_mp.weight_sync.update import WeightSync
from grpo_mp.weight_sync.wire import WireFormat
from tests.weight_sync.test_plan import EXPERTS, Case, plan_of, resharders


def test_the_next_round_is_packed_while_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one of two nodes that send each other half of the experts; its messages go nowhere."""
    calls: list[str] = []
    pack = Resharder.messages

    def packed(resharder: Resharder, round_: RankRound) -> dict[int, Tensor]:
        calls.append("pack")
        return pack(resharder, round_)

    def begun(operations: Sequence[Any]) -> list[SimpleNamespace]:
        calls.append("isend")
        return [SimpleNamespace(wait=lambda: calls.append("wait"))] * len(operations)

    monkeypatch.setattr(Resharder, "messages", packed)
    monkeypatch.setattr(dist, "P2POp", lambda *_, **__: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", begun)
    case = Case("qwen3_moe", 2, 1, LayoutConfig(expert=2), 2, EngineParallelism(1, 1, 1, 1, 1, EXPERTS))
    first, *_ = resharders(case, plan_of(case))
    rounds = [round_ for round_ in first.rounds if round_.sends and round_.receives]
    assert len(rounds) > 2
    for _ in first.stages(rounds):
        calls.append("staged")
    sent = ["wait", "wait", "staged"]
    assert calls == ["pack", *["isend", "pack", *sent] * (len(rounds) - 1), "isend", *sent]


def test_a_round_is_exchanged_while_the_engine_loads_the_one_before() -> None:
    calls: list[str] = []

    def stages(rounds: Sequence[int]) -> Iterator[NamedTensors]:
        for number in rounds:
            calls.append(f"exchanged {number}")
            yield []

    @contextmanager
    def loading(round_: int, _: NamedTensors) -> Iterator[None]:
        calls.append(f"loading {round_}")
        yield
        calls.append(f"loaded {round_}")

    resharder = SimpleNamespace(rounds=(0, 1, 2), stages=stages, sent_bytes=lambda _: 0)
    link = SimpleNamespace(
        begin=lambda: None, end=lambda _: None, loading=loading, rollout=SimpleNamespace(client=None)
    )
    WeightSync(cast(Resharder, resharder), cast(EngineLink, link)).update_weights(1)
    assert calls == [
        "exchanged 0",
        *("loading 0", "exchanged 1", "loaded 0"),
        *("loading 1", "exchanged 2", "loaded 1"),
        *("loading 2", "loaded 2"),
    ]


def test_a_shard_that_several_ranks_are_sent_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of two nodes with a part each: the one of each node that joins a matrix gets every part."""
    made: list[Shard] = []
    convert = WireFormat.shard_tensors

    def converted(wire: WireFormat, shard: Shard, tensor: Tensor) -> list[Tensor]:
        made.append(shard)
        return convert(wire, shard, tensor)

    monkeypatch.setattr(WireFormat, "shard_tensors", converted)
    layout, engine = LayoutConfig(tensor=4, expert_tensor=4), EngineParallelism(1, 1, 1, 1, 1, EXPERTS)
    case = Case("qwen3_moe", 4, 2, layout, 4, engine, fp8=True, round_bytes=200_000, shape="wide")
    sent: list[Shard] = []
    for resharder in resharders(case, plan_of(case)):
        for round_ in resharder.rounds:
            resharder.messages(round_)
            sent += chain(*map(set, round_.sends.values()))
            assert Counter(made) == Counter(set(chain(*round_.sends.values())))
            made.clear()
    assert len(sent) > len(set(sent))
