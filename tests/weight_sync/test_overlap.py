"""The order of a sync: what is sent, packed and loaded at the same time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import cast

import pytest
from torch import Tensor

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.rollout.engine_layout import EngineParallelism
from grpo_mp.rollout.shared_memory import NamedTensors
from grpo_mp.weight_sync.plan import Shard
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import EngineLink
from grpo_mp.weight_sync.update import WeightSync
from grpo_mp.weight_sync.wire import WireFormat
from tests.weight_sync.test_plan import EXPERTS, Case, plan_of, resharders


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
