"""Speeds of engines and the tail of a generation, from numbers written out."""

import pytest

from grpo_mp.monitor.metrics import find_metric
from grpo_mp.trainer.generation_times import EngineWork, generation_times, slowest_rank_ratio


def test_the_slowest_engine_and_the_tail() -> None:
    fast = EngineWork(1000, (1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0))  # 200 tokens/s
    slow = EngineWork(500, (6.0, 10.0))  # 50 tokens/s; the ninth group of ten ends at 6 s, the last at 10 s
    found = generation_times([fast, slow])
    assert found == pytest.approx({"speed/slowest_engine_ratio": 0.25, "time/generate_tail_share": 0.4})
    assert all(find_metric(name, "scalar") for name in found)


def test_engines_without_groups_of_the_step_do_not_count() -> None:
    idle = EngineWork(0, ())
    assert generation_times([idle, EngineWork(10, (2.0, 2.0))])["speed/slowest_engine_ratio"] == 1.0
    assert generation_times([idle]) == generation_times([EngineWork(7, (0.0,))]) == {}


def test_the_slowest_rank_beside_the_median_one() -> None:
    assert slowest_rank_ratio([1.0, 3.0]) == 3.0
    assert slowest_rank_ratio([1.0, 2.0, 2.0, 3.0]) == 1.5
    assert find_metric("time/slowest_rank_ratio", "scalar")
