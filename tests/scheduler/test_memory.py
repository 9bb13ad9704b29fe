from collections.abc import Iterator

import pytest
import torch

from grpo_mp import platform
from grpo_mp.trainer.phase_manager import MemoryTracker, MemoryUsage, max_usage


def test_largest_field_by_field() -> None:
    assert max_usage([MemoryUsage(1, 9, 3), MemoryUsage(4, 2, 3), MemoryUsage(2, 2, 7)]) == MemoryUsage(4, 9, 7)
    assert max_usage(iter([MemoryUsage(1, 2, 3)])) == MemoryUsage(1, 2, 3)


def test_the_largest_of_a_phase_is_kept_until_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: Iterator[int] = iter([30, 10, 20, 5])
    monkeypatch.setattr(platform, "host_bytes", lambda: next(hosts))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3)
    tracker = MemoryTracker()
    for phase in ("TRAIN", "TRAIN", "GENERATE"):
        tracker.end(phase)
    assert tracker.take() == {"TRAIN": MemoryUsage(30, 2, 3), "GENERATE": MemoryUsage(20, 2, 3)}
    assert tracker.take() == {}
    tracker.end("TRAIN")
    assert tracker.take() == {"TRAIN": MemoryUsage(5, 2, 3)}


def test_it_measures_this_process() -> None:
    tracker = MemoryTracker()
    tracker.end("TRAIN")
    usage = tracker.take()["TRAIN"]
    assert 10 * 2**20 < usage.host_bytes < 2**40
    assert usage.peak_device_bytes >= usage.device_bytes >= 0
