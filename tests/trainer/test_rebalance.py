"""Carried groups are evened out over the engines: each is somewhere once, with its tokens and experts."""

import pickle
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.groups import LaunchedGroups, PausedGroup
from grpo_mp.trainer import rebalance as rebalance_module
from grpo_mp.utils.types import Prompt, Sample, SampleGroup


class Exchange:
    """Ranks that are threads: what each gives to a collective, by rank."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._given = Barrier(ranks), [None] * ranks

    def all_gather(self, value: Any, rank: int) -> list[Any]:
        self._given[rank] = pickle.loads(pickle.dumps(value))
        self._barrier.wait(60)
        gathered = list(self._given)
        self._barrier.wait(60)
        return gathered

    def all_to_all(self, outgoing: Sequence[list[Any]], rank: int) -> list[Any]:
        return [item for of_rank in self.all_gather(outgoing, rank) for item in of_rank[rank]]


def paused(number: int) -> PausedGroup:
    experts = np.full((number % 3 + 4, 2, 2), number % 256, dtype=np.uint8)
    output = EngineOutput((number, 1, 2), (-1.0, -2.0, -0.5), (number,) * 3, False, True, routed_experts=experts)
    ended = EngineOutput((number, 3), (-1.0, -2.0), (number, number + 1), False)
    return PausedGroup(Prompt(number, "?", (number,)), (output, ended))


def finished(number: int) -> SampleGroup:
    return SampleGroup(Prompt(number, "?", (number,)), (Sample(number, 0, (1,), (2,), (-1.0,), (0,), False),))


def test_every_engine_has_its_share_and_no_group_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = PausedGroup(Prompt(40, "?", (1,)), samples=finished(40).samples)
    before: list[LaunchedGroups] = [
        {number: paused(number) for number in (0, 3, 4, 5, 8, 9, 11)},
        {1: finished(1), 2: finished(2), 6: finished(6)},
        {7: paused(7), 10: finished(10), 40: episode},
        {12: paused(12), 13: paused(13)},  # of an engine that has left
    ]
    ranks = Exchange(len(before))
    monkeypatch.setattr(rebalance_module, "all_gather", ranks.all_gather)
    monkeypatch.setattr(rebalance_module, "all_to_all", ranks.all_to_all)

    def of_rank(rank: int) -> LaunchedGroups:
        group: Any = rank
        return rebalance_module.rebalance(before[rank], rank < 3, group)

    with ThreadPoolExecutor(len(before)) as pool:
        after = list(pool.map(of_rank, range(len(before))))
    counts = [sum(isinstance(one, PausedGroup) and bool(one.outputs) for one in groups.values()) for groups in after]
    assert counts == [4, 3, 3, 0]
    assert Counter(number for groups in after for number in groups) == Counter(n for groups in before for n in groups)
    assert [n for groups in after[:1] for n in groups] == [0, 3, 4, 5]  # the oldest stay
    assert (after[1].keys() >= {1, 2, 6}, after[2].keys() >= {7, 10, 40}) == (True, True)
    for number, group in ((number, group) for groups in after for number, group in groups.items()):
        expected = next(groups[number] for groups in before if number in groups)
        assert group == expected
        if isinstance(group, PausedGroup) and group.outputs:
            assert np.array_equal(group.outputs[0].routed_experts, paused(number).outputs[0].routed_experts)
